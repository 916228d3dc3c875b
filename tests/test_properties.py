"""Properties over random calls: each backend against float64, the reference against a dense form, the invariances.

Without a GPU a fixed, small number of examples; on a GPU SLATTN_EXAMPLES of each, from the seed SLATTN_SEED, and
conftest.py tells how many calls ran. `make random-cases` runs those alone, 20,000 of them.
"""

from __future__ import annotations

import functools
import os
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given

import conftest
from properties import (
    FAULTS,
    KERNELS,
    TENSORS,
    Call,
    assert_close,
    build,
    calls,
    dense,
    flattened,
    shaped_as,
    tensors,
    upcast,
)
from slattn import backends
from slattn.backends import tilelang
from slattn.testing import CASE_BUDGETS, Inputs, Results, counting_slots, oracle
from slattn.testing import run as run_backend
from test_backends import device_of, run_or_skip

EXAMPLES = int(os.environ.get("SLATTN_EXAMPLES", "300"))
SHRINK = EXAMPLES <= 300  # more are for finding something in the time there is: what is found is told as it was drawn
PART = 100  # calls of one test on a GPU, so that processes may share out those of a property

# The fixtures of conftest.py may serve all examples of a test: the data has its own generator, memory stays poisoned.
_COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
on_cpu = hypothesis.settings(**_COMMON, derandomize=True)
on_gpu = hypothesis.settings(**_COMMON, phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])])

EXACT = dict.fromkeys(TENSORS, (1e-10, 1e-10))
# Against magnitudes (`properties.dense`). bf16 rounds by 1.66e-3 on average, which the budgets count, and by 3.9e-3 at
# worst; up to four roundings meet in one element (the output's in delta, dS, P, the result).
BF16 = {name: (6 * budget, 2 * budget) for name, budget in CASE_BUDGETS.items()}
FIXED = 2.0**-32  # Hopper's backward has P in steps of 2^-39, an error of up to 2^-40 however small the weight
_DSINK = {"dsink": BF16["dsink"]}  # it has the sink's dtype, which may be bf16
NARROW = {
    torch.bfloat16: BF16,
    torch.float16: {n: (each / 8, norm / 8) if n != "lse" else (each, norm) for n, (each, norm) in BF16.items()}
    | _DSINK,
    torch.float32: dict.fromkeys(TENSORS, (3e-5, 1e-5)) | {"lse": BF16["lse"]} | _DSINK,
}


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model of a kernel's roundings as a backend named "model"."""
    monkeypatch.setitem(backends.MODULES, "model", "kernel_model")
    load = backends.load
    yield
    load.cache_clear()


def test_each_kernel_has_its_calls():
    assert set(KERNELS) == set(backends.MODULES) - {"reference", "model"}


# Float64.
@hypothesis.settings(on_cpu, max_examples=300)
@given(calls())
def test_reference_in_float64_equals_the_dense_form(call: Call):
    inputs = build(call, dtype=torch.float64)
    want, size = dense(inputs)
    assert_close(oracle(inputs), want, size, EXACT)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@hypothesis.settings(on_cpu, max_examples=60)
@given(calls())
def test_reference_equals_float64(dtype: torch.dtype, call: Call):
    if dtype == torch.float16:
        hypothesis.assume(call.case.values == "normal")  # others overflow
    inputs = build(call, dtype=dtype)
    assert_close(run_backend(inputs, "reference"), oracle(inputs), dense(inputs)[1], NARROW[dtype])


@hypothesis.settings(on_cpu, max_examples=100)
@given(calls())
def test_budgets_fit_a_kernel_that_rounds_once(call: Call):
    inputs = build(call)
    assert_close(run_backend(inputs, "model"), oracle(inputs), dense(inputs)[1], BF16)


def shapes_of(inputs: Inputs, floats: bool) -> Inputs:
    """The other forms that a flat call may have: [N, 1, D], [T, 1, K]; float32 keys beside bf16 queries."""
    kv = inputs.kv.float() if floats else inputs.kv
    if inputs.q.dim() == 4:
        return replace(inputs, kv=kv)
    return replace(inputs, kv=kv.unsqueeze(1), indices=inputs.indices.unsqueeze(1))


@hypothesis.settings(on_cpu, max_examples=60)
@given(calls(), hypothesis.strategies.booleans())
def test_other_forms_of_a_call(call: Call, floats: bool):
    inputs = build(call)
    got = run_backend(shapes_of(inputs, floats), "reference")
    assert got.dkv.dtype == (torch.float32 if floats else torch.bfloat16)
    assert_close(shaped_as(got, inputs), oracle(inputs), dense(inputs)[1], BF16)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_hundred_calls_find(fault: Callable[[Inputs], Inputs]):
    @hypothesis.settings(on_cpu, max_examples=100, phases=[Phase.generate])
    @given(calls())
    def property_(call: Call) -> None:
        inputs = build(call)
        assert_close(run_backend(fault(inputs), "reference"), *dense(inputs), BF16)

    with pytest.raises(AssertionError):
        property_()


# The invariances. Each is a way to compute a call by others.
Run = Callable[[Inputs], Results]


def by_permuted_slots(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    order = torch.rand(inputs.indices.shape, generator=g).argsort(-1).to(inputs.indices.device)
    masked = inputs.indices.masked_fill(~counting_slots(inputs), -1)
    return run(replace(inputs, indices=masked.gather(-1, order), topk_length=None))


def by_more_slots(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    fillers = torch.tensor([-1, -(2**31), 2**31 - 1, inputs.kv.shape[-2], inputs.kv.shape[-2] + 1])
    extra = int(torch.randint(1, 130, (), generator=g))
    drawn = fillers[torch.randint(len(fillers), (*inputs.indices.shape[:-1], extra), generator=g)]
    return run(replace(inputs, indices=torch.cat([inputs.indices, drawn.to(inputs.indices)], -1)))


def by_parts_of_queries(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    dim = inputs.q.dim() - 3
    cut = int(torch.randint(inputs.q.shape[dim] + 1, (), generator=g))
    parts = []
    for start, length in ((0, cut), (cut, inputs.q.shape[dim] - cut)):
        names = ("q", "indices", "topk_length", "grad_out", "grad_lse")
        rows = {name: x.narrow(dim, start, length) for name, x in tensors(inputs) if name in names}
        parts.append(run(replace(inputs, **rows)))
    dsink = None if parts[0].dsink is None else parts[0].dsink + parts[1].dsink
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim) for name in ("out", "lse", "dq")}
    return Results(**joined, dkv=parts[0].dkv + parts[1].dkv, dsink=dsink)


def by_parts_of_heads(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    dim = inputs.q.dim() - 2
    heads = inputs.q.shape[dim]
    if heads == 1:
        return run(inputs)
    cut = int(torch.randint(1, heads, (), generator=g))
    parts = []
    for start, length in ((0, cut), (cut, heads - cut)):
        names = ("q", "grad_out", "grad_lse")
        some = {name: x.narrow(dim, start, length) for name, x in tensors(inputs) if name in names}
        if inputs.attn_sink is not None:
            some["attn_sink"] = inputs.attn_sink[start : start + length]
        parts.append(run(replace(inputs, **some)))
    dsink = None if parts[0].dsink is None else torch.cat([part.dsink for part in parts])
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim) for name in ("out", "lse", "dq")}
    return Results(**joined, dkv=parts[0].dkv + parts[1].dkv, dsink=dsink)


def by_rows_that_are_not_empty(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    flat = flattened(inputs)
    rows = counting_slots(flat).any(-1)
    few = {name: x[rows] for name, x in tensors(flat) if name not in ("kv", "attn_sink")}
    got = run(replace(flat, **few))
    full = {}
    for name, like, nothing in (("out", flat.grad_out, 0.0), ("lse", flat.q[..., 0], torch.inf), ("dq", flat.q, 0.0)):
        full[name] = torch.full(like.shape, nothing, dtype=getattr(got, name).dtype, device=like.device)
        full[name][rows] = getattr(got, name)
    return shaped_as(replace(got, **full), inputs)


def by_the_other_layout(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    """A batch as one flat call, a flat call as a batch of one."""
    other = flattened(inputs)
    if inputs.q.dim() == 3:
        other = replace(inputs, **{name: x[None] for name, x in tensors(inputs) if name != "attn_sink"})
    return shaped_as(run(other), inputs)


def by_the_other_integers(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    if inputs.indices.dtype == torch.int32:
        return run(replace(inputs, indices=inputs.indices.long()))
    return run(replace(inputs, indices=inputs.indices.masked_fill(~counting_slots(inputs), 2**31 - 1).int()))


def by_contiguous_copies(inputs: Inputs, g: torch.Generator, run: Run) -> Results:
    return run(replace(inputs, **{name: x.contiguous() for name, x in tensors(inputs)}))


WAYS = pytest.mark.parametrize(
    "way",
    [
        by_permuted_slots,
        by_more_slots,
        by_parts_of_queries,
        by_parts_of_heads,
        by_rows_that_are_not_empty,
        by_the_other_layout,
        by_the_other_integers,
        by_contiguous_copies,
    ],
    ids=lambda way: way.__name__,
)
Way = Callable[[Inputs, torch.Generator, Run], Results]


@WAYS
@hypothesis.settings(on_cpu, max_examples=60)
@given(calls())
def test_invariance_of_the_reference(way: Way, call: Call):
    inputs = upcast(build(call, dtype=torch.float64))
    run = lambda x: run_backend(x, "reference")  # noqa: E731
    got = way(inputs, torch.Generator().manual_seed(call.seed), run)
    assert_close(got, run(inputs), dense(inputs)[1], dict.fromkeys(TENSORS, (1e-12, 1e-12)))


# On a GPU.
PARTS = pytest.mark.parametrize("part", range(-(-EXAMPLES // PART)))
Check = Callable[[Call], dict[str, float]]


@pytest.fixture
def drawn(request: pytest.FixtureRequest, part: int) -> Callable[..., None]:
    """Checks this part's calls; how many there were and how near to their budgets they came is for conftest.py."""
    seed = zlib.crc32(f"{os.environ['SLATTN_SEED']} {request.node.name}".encode())
    told = {"calls": 0, "shares": {}}
    request.node.user_properties.append(("random calls", told))

    def over(name: str, strategy: hypothesis.strategies.SearchStrategy[Call], check: Check) -> None:
        told["name"] = name

        @hypothesis.seed(seed)
        @hypothesis.settings(on_gpu, max_examples=min(PART, EXAMPLES - part * PART))
        @given(strategy)
        def property_(call: Call) -> None:
            for tensor, share in check(call).items():
                told["shares"][tensor] = max(share, told["shares"].get(tensor, 0.0))
            told["calls"] += 1

        property_()

    return over


def run_on(inputs: Inputs, backend: str, few: bool, deterministic: bool = False) -> Results:
    """`few`: on two multiprocessors, so that Hopper's own kernels take one row after another. By the number of
    slots they make delta themselves for every query, for those with some slots, or for none.
    """
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(tilelang, "_multiprocessors", lambda device: 2)
        patch.setattr(tilelang, "DELTA_WITHIN", (1, 20, tilelang.NEVER)[inputs.indices.shape[-1] % 3])
        return run_or_skip(inputs, backend, deterministic)


def on_cpu_again(results: Results) -> Results:
    """On the CPU too is what they are compared with: of the GPU's time there is least."""
    named = {field.name: getattr(results, field.name) for field in fields(results)}
    return Results(**{name: None if x is None else x.cpu() for name, x in named.items()})


def budgets_of(backend: str, inputs: Inputs, results: int) -> dict[str, tuple[float, float]]:
    """BF16 for the difference of `results` roundings; wider where cuDNN runs twice (`slattn.testing`)."""
    twice = backend == "flashmla_cudnn" and inputs.grad_lse is not None
    factor = results * (1.25 if twice else 1.0)
    return {name: (each * factor, norm * factor) for name, (each, norm) in BF16.items()}


def check_against_float64(backend: str, way: Way | None, call: Call, device: str | None = None) -> dict[str, float]:
    """A call, and the same by a way to compute it by others; the shares that the former takes of its budgets."""
    fixed = backend == "tilelang" and call.case.heads > 32 and call.case.head_dim >= 512  # Hopper's backward
    truth, size = dense(build(call), FIXED if fixed else 0.0)
    inputs = build(call, device or device_of(backend))
    run = functools.partial(run_on, backend=backend, few=call.seed % 2 == 1)
    got = on_cpu_again(run(inputs))
    shares = assert_close(got, truth, size, budgets_of(backend, inputs, 1))
    if way is not None:
        other = way(inputs, torch.Generator().manual_seed(call.seed), run)
        assert_close(on_cpu_again(other), got, size, budgets_of(backend, inputs, 3))
    return shares


@pytest.mark.gpu
@PARTS
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_equal_float64(backend: str, part: int, drawn: Callable[..., None]):
    drawn(backend, KERNELS[backend], functools.partial(check_against_float64, backend, None))


@pytest.mark.gpu
@PARTS
def test_reference_on_a_gpu_equals_float64(part: int, drawn: Callable[..., None]):
    check = functools.partial(check_against_float64, "reference", None, device="cuda")
    drawn("reference", calls(dims=(5, 64, 512, 576)), check)


@pytest.mark.gpu
@WAYS
@PARTS
@pytest.mark.parametrize("backend", KERNELS)
def test_invariance_of_the_kernels(backend: str, part: int, way: Way, drawn: Callable[..., None]):
    drawn(backend, KERNELS[backend], functools.partial(check_against_float64, backend, way))


@pytest.mark.parametrize("way", [None, by_permuted_slots, by_parts_of_heads])
@hypothesis.settings(on_cpu, max_examples=20)
@given(calls(dims=(64, 512)))
def test_the_checks_pass_a_kernel_that_rounds_once(way: Way | None, call: Call):
    assert set(check_against_float64("model", way, call)) >= {"out", "lse", "dq", "dkv"}


def test_the_calls_are_counted(monkeypatch: pytest.MonkeyPatch):
    def report(calls: int, share: float, when: str = "call") -> types.SimpleNamespace:
        told = {"name": "tilelang", "calls": calls, "shares": {"dq": share}}
        return types.SimpleNamespace(when=when, user_properties=[("random calls", told)])

    monkeypatch.setenv("SLATTN_SEED", "5")
    lines: list[str] = []
    stats = {"passed": [report(1000, 0.25), report(100, 0.5)], "failed": [report(7, 0.125), report(9, 0.5, "teardown")]}
    conftest.pytest_terminal_summary(types.SimpleNamespace(stats=stats, section=lines.append, line=lines.append))
    assert lines[1:] == [
        "  1,107 tilelang; of a budget at most: dq 0.50",
        "  1,107 in all, SLATTN_SEED=5; 1 tests of them failed",
    ]


def same_bits(call: Call) -> dict[str, float]:
    """Deterministic mode twice, on other numbers of multiprocessors, and with the queries in another order."""
    truth, size = dense(build(call))
    inputs = build(call, "cuda")
    first, again = (run_on(inputs, "tilelang", few, deterministic=True) for few in (False, True))
    for name in TENSORS:
        x, y = getattr(first, name), getattr(again, name)
        assert x is y is None or torch.equal(x, y), name
    flat = flattened(inputs)
    order = torch.randperm(len(flat.q), generator=torch.Generator().manual_seed(call.seed)).to("cuda")
    moved = replace(flat, **{name: x[order] for name, x in tensors(flat) if name not in ("kv", "attn_sink")})
    plain, other = (run_or_skip(x, "tilelang", deterministic=True) for x in (flat, moved))
    assert torch.equal(plain.dkv, other.dkv)
    assert torch.equal(plain.dq[order], other.dq)
    # A row's unit is of what its parts are expected to be: an element may be far below it.
    budgets = BF16 | {"dkv": (1e30, BF16["dkv"][1] + 6e-4)}
    return assert_close(on_cpu_again(first), truth, size, budgets)


@pytest.mark.gpu
@PARTS
def test_deterministic_kernels_have_the_same_bits(part: int, drawn: Callable[..., None]):
    drawn("tilelang, deterministic", KERNELS["tilelang"], same_bits)
