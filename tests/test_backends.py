"""Every backend on every case against float64, the contract's invariances, and the choice between backends."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from torch import Tensor

import kernel_model
import slattn
from slattn import backends, reference
from slattn.problem import Problem, describe
from slattn.testing import (
    BENCH_SHAPES,
    BUDGETS,
    CASE_BUDGETS,
    CASES,
    Case,
    Inputs,
    Results,
    Shape,
    bench_inputs,
    check,
    counting_slots,
    make_inputs,
    oracle,
    relative_error,
    run,
)

gpu = pytest.mark.gpu
BY_NAME = {case.name: case for case in CASES}
TENSORS = tuple(CASE_BUDGETS)

# What flashmla_cudnn may refuse: that a library is not there, or a limit of the two. A failed self-test is none.
REAL_LIMIT = re.compile("is missing|take D = 512|takes? a positive scale|compute capability|from run to run")


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model of a kernel's roundings as a backend named "model"."""
    monkeypatch.setitem(backends.MODULES, "model", "kernel_model")
    load = backends.load
    yield
    load.cache_clear()


def device_of(backend: str) -> str:
    return "cpu" if backend in ("reference", "model") else "cuda"


def run_or_skip(inputs: Inputs, backend: str, deterministic: bool = False) -> Results:
    """`run`; where flashmla_cudnn names a real limit of the libraries under it, skip with its words."""
    try:
        return run(inputs, backend, deterministic)
    except slattn.BackendRefusal as refusal:
        _skip_only_a_real_limit(backend, refusal)


def _skip_only_a_real_limit(backend: str, refusal: slattn.BackendRefusal) -> NoReturn:
    if backend != "flashmla_cudnn" or not REAL_LIMIT.search(str(refusal)):
        pytest.fail(str(refusal))
    pytest.skip(str(refusal))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "backend", ["reference", "model", pytest.param("tilelang", marks=gpu), pytest.param("flashmla_cudnn", marks=gpu)]
)
def test_case_against_float64(backend: str, case: Case):
    """In bfloat16, each tensor within its budget, and exactly zero where the contract says nothing."""
    try:
        rows = check(case, backend, device_of(backend))
    except slattn.BackendRefusal as refusal:
        _skip_only_a_real_limit(backend, refusal)
    failures = [f"{row.tensor}: {row.error:.2e} > {row.budget:.2e}" for row in rows if not row.passed]
    assert not failures, "; ".join(failures)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_in_float32_against_float64(case: Case):
    """Four thousand times closer than bfloat16, except where the data cancels."""
    inputs = make_inputs(case, "cpu", torch.float32)
    got, want = run(inputs, "reference"), oracle(inputs)
    for name in TENSORS:
        budget = 2e-6
        if name == "dsink" and case.sink == "bf16":
            budget = CASE_BUDGETS[name]  # it has the sink's dtype
        elif case.budgets:
            budget = 1e-4
        if getattr(want, name) is not None:
            assert relative_error(getattr(got, name), getattr(want, name)) < budget, name


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_on_a_gpu(case: Case):
    rows = check(case, "reference", "cuda")
    assert [row.tensor for row in rows if not row.passed] == []


def test_budgets_notice_a_second_rounding(monkeypatch: pytest.MonkeyPatch):
    """The model rounds P and dS once and meets every budget (above); rounding twice must not."""
    monkeypatch.setattr(kernel_model, "EXTRA_ROUNDINGS", True)
    for name in ("sink-none", "indices-holes", "batch-1"):
        failed = {row.tensor for row in check(BY_NAME[name], "model", "cpu") if not row.passed}
        assert {"out", "dq", "dkv"} <= failed, name


def test_budgets_of_cases_are_no_tighter_than_those_of_random_data():
    for case in CASES:
        assert all(case.budgets.get(name, 1.0) > CASE_BUDGETS[name] >= BUDGETS[name] for name in TENSORS), case.name


def test_names_of_cases_are_distinct():
    assert len(BY_NAME) == len(CASES)


def test_check_sees_what_must_be_zero(monkeypatch: pytest.MonkeyPatch):
    """1e-30 in the gradient of a key that nobody names is far below any budget, and still an error."""
    true_backward = reference.backward

    def leaky(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        dq, dkv, dsink = true_backward(*args, **kwargs)
        if dkv.dtype == torch.bfloat16:  # the oracle stays right
            dkv[dkv == 0] = 1e-30
        return dq, dkv, dsink

    monkeypatch.setattr(reference, "backward", leaky)
    rows = {row.tensor: row for row in check(BY_NAME["keys-31"], "reference", "cpu")}
    assert rows["dkv"].passed  # every key is named
    rows = {row.tensor: row for row in check(BY_NAME["values-unseen"], "reference", "cpu")}
    assert not rows["dkv"].passed
    assert rows["dq"].passed


def test_relative_error():
    want = torch.tensor([3.0, 4.0, torch.inf, -torch.inf, torch.nan])
    assert relative_error(want, want) == 0.0
    assert relative_error(want + torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0]), want) == pytest.approx(0.1)
    for wrong in ([3, 4, -torch.inf, -torch.inf, torch.nan], [3, 4, torch.inf, -torch.inf, 0], [torch.inf] * 5):
        assert relative_error(torch.tensor(wrong), want) == torch.inf
    assert relative_error(torch.full((2,), torch.nan), torch.ones(2)) == torch.inf
    assert relative_error(torch.tensor([torch.nan]), torch.tensor([torch.inf])) == torch.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-45]), torch.zeros(2)) == torch.inf
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.zeros(2), torch.zeros(3))


@gpu
@pytest.mark.parametrize("shape", BENCH_SHAPES.values(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("backend", ["tilelang", "flashmla_cudnn"])
def test_benchmark_shapes_within_their_budgets(backend: str, shape: Shape):
    """128 queries of each: as many slots, heads and columns as the benchmark has."""
    inputs = bench_inputs(dataclasses.replace(shape, queries=128), "cuda")
    got, want = run_or_skip(inputs, backend), oracle(inputs)
    for name, budget in BUDGETS.items():
        assert relative_error(getattr(got, name), getattr(want, name)) <= budget, name


# Invariances of the contract. Bit for bit where no sum changes its order, otherwise within what the order may change.
INVARIANT = ["reference", pytest.param("tilelang", marks=gpu), pytest.param("flashmla_cudnn", marks=gpu)]
CLOSE = {"reference": 1e-6, "tilelang": 4e-3, "flashmla_cudnn": 4e-3}  # two results, each rounded to bfloat16


def case_inputs(backend: str, **changes: object) -> Inputs:
    """64 heads, D = 512, 16 queries with holes; float32 on the reference, bfloat16 on kernels."""
    case = Case("invariance", heads=64, queries=16, slots=128, indices="holes", **changes)
    dtype = torch.float32 if backend == "reference" else torch.bfloat16
    return make_inputs(case, device_of(backend), dtype)


def close(got: Results, want: Results, budget: float, names: tuple[str, ...] = TENSORS) -> None:
    for name in names:
        assert relative_error(getattr(got, name), getattr(want, name)) < budget, name


@pytest.mark.parametrize("backend", INVARIANT)
def test_order_of_the_slots_does_not_matter(backend: str):
    inputs = case_inputs(backend)
    order = torch.rand(inputs.indices.shape).argsort(-1).to(inputs.indices.device)
    permuted = dataclasses.replace(inputs, indices=inputs.indices.gather(-1, order))
    close(run_or_skip(permuted, backend), run_or_skip(inputs, backend), CLOSE[backend])


@pytest.mark.parametrize("backend", INVARIANT)
@pytest.mark.parametrize("extra", [1, 64, 500])
def test_invalid_slots_change_nothing(backend: str, extra: int):
    inputs = case_inputs(backend)
    filler = torch.randint(inputs.kv.shape[0], 2**31 - 1, (16, extra), dtype=torch.int32).to(inputs.indices.device)
    padded = dataclasses.replace(inputs, indices=torch.cat([inputs.indices, filler], -1))
    close(run_or_skip(padded, backend), run_or_skip(inputs, backend), CLOSE[backend])


@pytest.mark.parametrize("backend", INVARIANT)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(backend: str, wanted: tuple[bool, bool]):
    inputs = case_inputs(backend)
    want = run_or_skip(inputs, backend)
    dq, dkv, dsink = slattn.sparse_attention_backward(
        *(inputs.q, inputs.kv, inputs.indices, want.out, want.lse, inputs.grad_out),
        attn_sink=inputs.attn_sink,
        needs=(*wanted, True),
        backend=backend,
    )
    for got, full, asked in ((dq, want.dq, wanted[0]), (dkv, want.dkv, wanted[1]), (dsink, want.dsink, True)):
        assert (got is None) != asked
        assert got is None or relative_error(got, full) < CLOSE[backend]


@pytest.mark.parametrize("backend", INVARIANT)
def test_a_length_is_as_invalid_slots_behind_it(backend: str):
    inputs = case_inputs(backend, lengths="random")
    masked = inputs.indices.masked_fill(~counting_slots(inputs), -1)
    without = dataclasses.replace(inputs, indices=masked, topk_length=None)
    close(run_or_skip(inputs, backend), run_or_skip(without, backend), CLOSE[backend])


def rows_of(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """The call restricted to some of its queries."""
    length = None if inputs.topk_length is None else inputs.topk_length[rows]
    return dataclasses.replace(
        inputs,
        q=inputs.q[rows],
        indices=inputs.indices[rows],
        topk_length=length,
        grad_out=inputs.grad_out[rows],
    )


@pytest.mark.parametrize("backend", INVARIANT)
def test_queries_may_be_split(backend: str):
    """out, lse and dq of each part bit for bit those of the whole; dkv and dsink add up."""
    inputs = case_inputs(backend)
    whole = run_or_skip(inputs, backend)
    parts = [run_or_skip(rows_of(inputs, part), backend) for part in (slice(0, 5), slice(5, 16))]
    for name in ("out", "lse", "dq"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    for name in ("dkv", "dsink"):
        total = sum(getattr(part, name).float() for part in parts)
        assert relative_error(total, getattr(whole, name)) < CLOSE[backend], name


@pytest.mark.parametrize("backend", INVARIANT)
@pytest.mark.parametrize("sink", [None, "random"])
def test_empty_rows_may_be_removed(backend: str, sink: str | None):
    """The other rows' out, lse and dq bit for bit; the sums over rows as well as their order allows."""
    inputs = case_inputs(backend, sink=sink)
    inputs.indices[[0, 7, 8, 15]] = -1
    rows = counting_slots(inputs).any(-1).nonzero().squeeze(-1)
    assert len(rows) == 12
    whole, few = run_or_skip(inputs, backend), run_or_skip(rows_of(inputs, rows), backend)
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(whole, name)[rows], getattr(few, name)), name
    close(few, whole, 1e-6 if backend == "reference" else 1e-4, ("dkv", "dsink") if sink else ("dkv",))


@pytest.mark.parametrize("backend", INVARIANT)
def test_heads_do_not_touch_each_other(backend: str):
    """NaN in one head's queries and sink stays in that head's out and dq."""
    inputs = case_inputs(backend)
    inputs.q[:, 5] = torch.nan
    inputs.attn_sink[9] = torch.nan
    results = run_or_skip(inputs, backend)
    others = torch.tensor([h not in (5, 9) for h in range(64)], device=inputs.q.device)
    clean = run_or_skip(
        dataclasses.replace(inputs, q=inputs.q.nan_to_num(), attn_sink=inputs.attn_sink.nan_to_num()), backend
    )
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(results, name)[:, others], getattr(clean, name)[:, others]), name


@pytest.mark.parametrize("backend", INVARIANT)
def test_batch_entries_do_not_touch_each_other(backend: str):
    """Key N - 1 of one entry and key 0 of the next are neighbours in memory; -1 is neither."""
    inputs = case_inputs(backend, batch=2)
    indices = torch.full_like(inputs.indices, -1)
    indices[0, :, :2] = torch.tensor([149, 150], dtype=torch.int32)
    indices[1, :, 1] = 0
    results = run_or_skip(dataclasses.replace(inputs, indices=indices), backend)
    assert not results.dkv[0, :149].any()
    assert results.dkv[0, 149].any()
    assert results.dkv[1, 0].any()
    assert not results.dkv[1, 1:].any()


@gpu
@pytest.mark.parametrize("backend", ["reference", "tilelang", "flashmla_cudnn"])
def test_deterministic_mode_is_bit_for_bit_or_refused(backend: str):
    """Worst contention: every slot of 512 queries names one of 64 keys."""
    case = Case("contention", heads=64, queries=512, keys=64, slots=128, indices="duplicates")
    inputs = make_inputs(case, "cuda")
    try:
        runs = [run(inputs, backend, deterministic=True) for _ in range(5)]
    except slattn.BackendRefusal as refusal:
        assert re.search("run to run|is missing", str(refusal))  # noqa: PT017 (to refuse by name is right)
        return
    for again in runs[1:]:
        for name in TENSORS:
            assert torch.equal(getattr(again, name), getattr(runs[0], name)), name


def test_deterministic_mode_on_a_cpu():
    inputs = make_inputs(Case("contention", queries=64, keys=64, indices="duplicates"), "cpu")
    first, second = (run(inputs, "reference", deterministic=True) for _ in range(2))
    for name in TENSORS:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


# The choice.
def problem(**changes: object) -> Problem:
    small = describe(torch.zeros(2, 16, 512), torch.zeros(5, 512), torch.zeros(2, 4, dtype=torch.int32))
    return small._replace(**changes)


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both kernel backends refuse, by a reason each."""

    class Refusing:
        def __init__(self, name: str) -> None:
            self.refusal = lambda problem: f"{name} is not in the mood"

    modules = {name: Refusing(name) for name in ("tilelang", "flashmla_cudnn")} | {"reference": reference}
    monkeypatch.setattr(backends, "load", modules.__getitem__)
    monkeypatch.setattr(backends, "MODULES", dict.fromkeys(modules, ""))
    backends._say_once.cache_clear()
    yield
    backends._say_once.cache_clear()


def test_auto_on_a_cpu_is_the_reference_and_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(problem(), "auto") == "reference"


@pytest.mark.usefixtures("_fakes")
def test_auto_on_a_gpu_says_once_why_it_is_the_reference():
    on_gpu = problem(device=torch.device("cuda", 0))
    with pytest.warns(
        UserWarning, match="slow reference .* tilelang is not in the mood; flashmla_cudnn: flashmla_cudnn is"
    ):
        assert backends.choose(on_gpu, "auto") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(on_gpu, "auto") == "reference"


@pytest.mark.usefixtures("_fakes")
def test_auto_takes_the_first_that_does_not_refuse(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends.load("flashmla_cudnn"), "refusal", lambda problem: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(problem(device=torch.device("cuda", 0)), "auto") == "flashmla_cudnn"


@pytest.mark.parametrize("backend", ["tilelang", "flashmla_cudnn"])
def test_a_named_backend_never_falls_back(backend: str):
    """On a CPU both kernels refuse, in a sentence that names the backend and the reason; forward and select alike."""
    arguments = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(5, 512).bfloat16(), torch.zeros(2, 4, dtype=torch.int32)
    for function in (slattn.sparse_attention, slattn.select_backend, slattn.select_kernels):
        with pytest.raises(slattn.BackendRefusal, match=f"^backend '{backend}' cannot run this call: .*cpu"):
            function(*arguments, backend=backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of 'tilelang'.*; got 'cuda'"):
        backends.load("cuda")
    with pytest.raises(ValueError, match="got 'cuda'"):
        backends.choose(problem(), "cuda")


@gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 96, "value_dim": 96},
        {"head_dim": 512, "value_dim": 256},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
    ],
)
@pytest.mark.parametrize("backend", ["tilelang", "flashmla_cudnn"])
def test_kernels_refuse_what_they_cannot(backend: str, changes: dict[str, object]):
    on_gpu = problem(device=torch.device("cuda", 0), **{"dtype": torch.bfloat16} | changes)
    reason = backends.load(backend).refusal(on_gpu)
    assert reason is not None
    assert reason == reason.strip()
