"""Properties over random calls: each backend against float64, the reference against a dense form, the invariances.

Without a GPU a fixed, small number of examples; on a GPU SLATTN_EXAMPLES of each, from the seed SLATTN_SEED.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given

from properties import TENSORS, Call, assert_close, build, calls, dense, flattened, shaped_as, tensors, upcast
from slattn import backends
from slattn.testing import CASE_BUDGETS, Inputs, Results, counting_slots, oracle
from slattn.testing import run as run_backend
from test_backends import run_or_skip

EXAMPLES = int(os.environ.get("SLATTN_EXAMPLES", "300"))
SEED = int(os.environ.get("SLATTN_SEED") or random.SystemRandom().randrange(2**32))

# The fixtures of conftest.py may serve all examples of a test: the data has its own generator, memory stays poisoned.
_COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
on_cpu = hypothesis.settings(**_COMMON, derandomize=True)
on_gpu = hypothesis.settings(**_COMMON, max_examples=EXAMPLES, print_blob=True)

EXACT = dict.fromkeys(TENSORS, (1e-10, 1e-10))
# Against magnitudes (`properties.dense`). bf16 rounds by 1.66e-3 on average, which the budgets count, and by 3.9e-3 at
# worst; up to four roundings meet in one element (the output's in delta, dS, P, the result).
BF16 = {name: (6 * budget, 2 * budget) for name, budget in CASE_BUDGETS.items()}
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


KERNELS = {
    "tilelang": calls(dims=(64, 128, 512, 576)),
    "flashmla_cudnn": calls(dims=(512, 576), positive=True),
}


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
def seeded(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(hypothesis.seed(SEED)(on_gpu(test)))


def budgets_of(backend: str, inputs: Inputs, results: int) -> dict[str, tuple[float, float]]:
    """BF16 for the difference of `results` roundings; wider where cuDNN runs twice (`slattn.testing`)."""
    twice = backend == "flashmla_cudnn" and inputs.grad_lse is not None
    factor = results * (1.25 if twice else 1.0)
    return {name: (each * factor, norm * factor) for name, (each, norm) in BF16.items()}


@seeded
@pytest.mark.parametrize("backend", KERNELS)
@given(hypothesis.strategies.data())
def test_kernels_equal_float64(backend: str, data: hypothesis.strategies.DataObject):
    print(f"SLATTN_SEED={SEED}")
    inputs = build(data.draw(KERNELS[backend]), "cuda")
    got = run_or_skip(inputs, backend)
    assert_close(got, oracle(inputs), dense(inputs)[1], budgets_of(backend, inputs, 1))


@seeded
@given(calls(dims=(5, 64, 512, 576)))
def test_reference_on_a_gpu_equals_float64(call: Call):
    print(f"SLATTN_SEED={SEED}")
    inputs = build(call, "cuda")
    assert_close(run_backend(inputs, "reference"), oracle(inputs), dense(inputs)[1], BF16)


@seeded
@WAYS
@pytest.mark.parametrize("backend", KERNELS)
@given(hypothesis.strategies.data())
def test_invariance_of_the_kernels(backend: str, way: Way, data: hypothesis.strategies.DataObject):
    print(f"SLATTN_SEED={SEED}")
    call = data.draw(KERNELS[backend])
    inputs = build(call, "cuda")
    run = lambda x: run_or_skip(x, backend)  # noqa: E731
    got = way(inputs, torch.Generator().manual_seed(call.seed), run)
    assert_close(got, run(inputs), dense(inputs)[1], budgets_of(backend, inputs, 3))
