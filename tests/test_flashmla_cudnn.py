"""The vendor backend: with stand-ins for both libraries everywhere, with the libraries themselves on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import slattn
from slattn.backends import flashmla_cudnn, vendor_runtimes
from slattn.testing import CASES, Case, check, make_inputs, oracle, relative_error, run
from vendor_stand_ins import CudnnDsa, FlashMla, forget, problem_with

DIALECTS = {
    "main": {},
    "nv_dev": {"form": "nv_dev", "slot_multiple": 512},
    "kwargs": {"form": "kwargs", "slot_multiple": 512},
    "base 2": {"base": 2.0, "clears": False},
    "not cleared": {"clears": False},
}
TAKEN = [case for case in CASES if case.head_dim in (512, 576) and (case.scale or 1) > 0]
NAMES = ("out", "lse", "dq", "dkv", "dsink")


@pytest.fixture(autouse=True)
def _forget(request):
    if not request.node.get_closest_marker("gpu"):
        forget()


@pytest.fixture
def pair(monkeypatch):
    """Put stand-ins in place of the installed libraries, and let them run on this machine's CPU."""
    real = flashmla_cudnn.refusal

    def refusal(problem):
        return real(problem._replace(device=torch.device("cuda")))

    def install(**dialect):
        flash_mla, dsa = FlashMla(**dialect), CudnnDsa()
        monkeypatch.setattr(vendor_runtimes, "flash_mla", lambda: vendor_runtimes.Runtime(flash_mla.function))
        monkeypatch.setattr(vendor_runtimes, "cudnn_dsa", lambda: vendor_runtimes.Runtime(dsa))
        return flash_mla, dsa

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(vendor_runtimes, "self_test_failure", lambda *arguments: None)
    monkeypatch.setattr(flashmla_cudnn, "refusal", refusal)
    return install


def _checked(case: Case, backend: str, device: str) -> None:
    rows = check(case, backend, device)
    bad = [f"{row.tensor} {row.error:.2e} > {row.budget:.2e}" for row in rows if not row.passed]
    assert not bad, "; ".join(bad)


# The whole backend with stand-ins, through the public op.


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_cases(case, pair):
    flash_mla, dsa = pair(clears=False)
    _checked(case, "flashmla_cudnn", "cpu")
    assert bool(dsa.calls) == bool(flash_mla.calls) == (case.queries > 0 and case.keys > 0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("head_dim", [512, 576])
def test_dialects(dialect, head_dim, pair):
    pair(**DIALECTS[dialect])
    case = Case(dialect, head_dim=head_dim, heads=8, indices="empty rows", lengths="mixed", slots=160, grad_empty=True)
    _checked(case, "flashmla_cudnn", "cpu")


@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        (1, [64]),
        (8, [64]),
        (24, [64]),
        (64, [64]),
        (96, [128]),
        (128, [128]),
        (160, [128, 64]),
        (192, [128, 64]),
        (256, [128, 128]),
    ],
)
def test_heads_run_in_groups_that_flashmla_takes(heads, groups, pair):
    flash_mla, dsa = pair()
    inputs = make_inputs(Case("heads", heads=heads, queries=2, slots=64), "cpu")
    got, want = run(inputs, "flashmla_cudnn"), oracle(inputs)
    asked = 1
    assert [call["q"].shape[1] for call in flash_mla.calls[asked:]] == groups
    assert [call["q"].shape[1] for call in dsa.calls] == groups
    for name in NAMES:
        assert relative_error(getattr(got, name), getattr(want, name)) < 5e-3, name


def test_rows_without_keys_change_nothing_elsewhere(pair):
    pair(clears=False)
    inputs = make_inputs(Case("empty", heads=64, queries=7, indices="empty rows", sink="random"), "cpu")
    full = (inputs.indices >= 0).any(-1)
    fewer = replace(inputs, q=inputs.q[full], indices=inputs.indices[full], grad_out=inputs.grad_out[full])
    got, want = run(inputs, "flashmla_cudnn"), run(fewer, "flashmla_cudnn")
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(got, name)[full], getattr(want, name))
    assert torch.equal(got.dkv, want.dkv)
    assert not got.out[~full].any()
    assert not got.dq[~full].any()


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_empty_row_may_hold_anything(everywhere, pair):
    pair()
    case = Case("nan", heads=64, indices="empty" if everywhere else "empty rows", grad_empty=True, grad_lse=True)
    inputs = make_inputs(replace(case, values="unseen"), "cpu")
    inputs.q[(inputs.indices < 0).all(-1)] = math.nan
    got = run(inputs, "flashmla_cudnn")
    for name in ("out", "dq", "dkv", "dsink"):
        assert getattr(got, name).isfinite().all(), name
    if everywhere:
        assert not got.dkv.any()
        assert not got.dq.any()


def test_float32_dkv_of_several_groups_is_summed_in_float32(pair):
    pair()
    inputs = make_inputs(Case("groups", heads=256, queries=2, slots=64, sink=None), "cpu")
    problem = problem_with(
        queries=2, keys=inputs.kv.shape[0], heads=256, slots=64, scale=512**-0.5, device=torch.device("cpu")
    )
    arguments = (problem, inputs.q[None], inputs.kv[None], inputs.indices[None], None, None)
    out, lse = flashmla_cudnn.forward(*arguments)
    _, dkv, dsink = flashmla_cudnn.backward(
        *arguments, out, lse, inputs.grad_out[None], None, needs=(False, True, False), dkv_dtype=torch.float32
    )
    assert dkv.dtype == torch.float32
    assert dsink is None
    assert not torch.equal(dkv, dkv.bfloat16().float())


def test_a_function_that_is_handed_in_is_called(pair):
    installed, _ = pair()
    mine, my_dsa = FlashMla(base=2.0), CudnnDsa()
    inputs = make_inputs(Case("mine", queries=2, slots=64, sink=None), "cpu")
    problem = problem_with(queries=2, keys=150, heads=16, slots=64, device=torch.device("cpu"))
    arguments = (problem, inputs.q[None], inputs.kv[None], inputs.indices[None], None, None)
    out, lse = flashmla_cudnn.forward(*arguments, sparse_fwd=mine.function)
    flashmla_cudnn.backward(
        *arguments,
        out,
        lse,
        inputs.grad_out[None],
        None,
        needs=(True, True, False),
        dkv_dtype=torch.bfloat16,
        sparse_bwd=my_dsa.sparse_attention_backward_wrapper,
    )
    assert mine.calls
    assert my_dsa.calls
    assert not installed.calls


@pytest.mark.parametrize(("head_dim", "most"), [(512, 4_194_240), (576, 3_728_256)])
def test_more_keys_than_cudnn_counts_are_refused(head_dim, most, pair, monkeypatch):
    pair()
    assert 2**31 - 64 * head_dim <= most * head_dim < 2**31
    takes = problem_with(batch=2, keys=most // 2, head_dim=head_dim)
    assert flashmla_cudnn.refusal(takes) is None
    more = takes._replace(keys=most // 2 + 1)
    assert f"at D = {head_dim}, takes up to {most} keys" in flashmla_cudnn.refusal(more)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert flashmla_cudnn.refusal(more) is None


# What the two libraries are handed.


def test_compact_rows_of_a_batch():
    indices = torch.tensor(
        [[[-1, 5, 100, 7, 2**31 - 1, -5, 9, -1]], [[3, 3, -(2**31), 99, 0, 1, 2, 4]]], dtype=torch.int32
    )
    rows, lengths = flashmla_cudnn.compact_rows(indices, torch.tensor([[99], [5]], dtype=torch.int32), 100, 10)
    assert rows.tolist() == [[5, 7, 9] + [-1] * 7, [103, 103, 199, 100] + [-1] * 6]
    assert lengths.tolist() == [3, 4]
    assert rows.dtype == lengths.dtype == torch.int32


def test_compact_rows_of_int64_that_int32_cannot_hold():
    indices = torch.tensor([[[2**32, 3, -(2**63), 2**62]]])
    rows, lengths = flashmla_cudnn.compact_rows(indices, None, 100, 4)
    assert rows.tolist() == [[3, -1, -1, -1]]
    assert lengths.tolist() == [1]


def test_slots_that_do_not_count_name_keys_that_somebody_names():
    rows = torch.tensor([[4, 2, -1], [-1, -1, -1], [1, -1, -1]], dtype=torch.int32)
    filled, lengths = flashmla_cudnn.without_empty_rows(rows, torch.tensor([2, 0, 1], dtype=torch.int32))
    assert filled.tolist() == [[4, 2, 4], [4, 4, 4], [1, 1, 1]]
    assert lengths.tolist() == [2, 1, 1]
    filled, lengths = flashmla_cudnn.without_empty_rows(torch.full((1, 2), -1), torch.zeros(1, dtype=torch.int32))
    assert filled.tolist() == [[0, 0]]
    assert lengths.tolist() == [1]


@pytest.mark.parametrize("slots", [1, 127, 128, 129, 160, 2063])
def test_the_width_handed_over_changes_nothing(slots, pair):
    case = Case("width", heads=8, queries=2, slots=slots, keys=300, sink=None)
    inputs = make_inputs(case, "cpu")
    pair()
    narrow = run(inputs, "flashmla_cudnn")
    pair(form="nv_dev", slot_multiple=512)
    wide = run(inputs, "flashmla_cudnn")
    for name in ("out", "lse", "dq", "dkv"):
        assert relative_error(getattr(wide, name), getattr(narrow, name)) < 1e-3, name


# The gradient of lse, against the reference in float64.


@pytest.mark.parametrize("sink", [None, "random", "+inf"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_gradient_of_lse_alone(sink, size, pair):
    pair()
    inputs = make_inputs(Case("lse", heads=64, indices="empty rows", sink=sink, grad_lse=True), "cpu")
    inputs = replace(inputs, grad_out=torch.zeros_like(inputs.grad_out), grad_lse=inputs.grad_lse * size)
    got, want = run(inputs, "flashmla_cudnn"), oracle(inputs)
    assert relative_error(got.dq, want.dq) < 4e-3
    assert relative_error(got.dkv, want.dkv) < 4e-3


def test_a_zero_gradient_of_lse_adds_nothing(pair):
    pair()
    inputs = make_inputs(Case("lse", heads=64, grad_lse=True), "cpu")
    zero, none = replace(inputs, grad_lse=torch.zeros_like(inputs.grad_lse)), replace(inputs, grad_lse=None)
    with_zero, without = run(zero, "flashmla_cudnn"), run(none, "flashmla_cudnn")
    assert torch.equal(with_zero.dq, without.dq)
    assert torch.equal(with_zero.dkv, without.dkv)


# The libraries themselves.


@pytest.fixture
def cuda():
    reason = flashmla_cudnn.refusal(problem_with(device=torch.device("cuda", torch.cuda.current_device())))
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [8, 64, 128, 192])
def test_accuracy_on_the_gpu(heads, head_dim, cuda):
    _checked(Case("gpu", heads=heads, head_dim=head_dim, queries=64, keys=512, slots=256), "flashmla_cudnn", cuda)


@pytest.mark.gpu
def test_rows_without_keys_change_nothing_elsewhere_on_the_gpu(cuda):
    inputs = make_inputs(Case("empty", heads=64, queries=62, indices="empty rows", grad_empty=True), cuda)
    full = (inputs.indices >= 0).any(-1)
    fewer = replace(inputs, q=inputs.q[full], indices=inputs.indices[full], grad_out=inputs.grad_out[full])
    got, want = run(inputs, "flashmla_cudnn"), run(fewer, "flashmla_cudnn")
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(got, name)[full], getattr(want, name)), name
    assert relative_error(got.dkv, want.dkv) < 1e-4


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_rows_that_become_empty(cuda):
    inputs = make_inputs(Case("graph", heads=64, queries=62, keys=300, sink=None), cuda)
    q, kv = inputs.q.clone().requires_grad_(), inputs.kv.clone().requires_grad_()
    indices = inputs.indices.clone()

    def step():
        out = slattn.sparse_attention(q, kv, indices, backend="flashmla_cudnn")
        return out, *torch.autograd.grad(out, [q, kv], inputs.grad_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for empty in ([], [0, 17, 61], range(62)):
        indices.copy_(inputs.indices)
        indices[list(empty)] = -1
        graph.replay()
        replayed = [x.clone() for x in results]
        eager = step()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1])
        assert relative_error(replayed[2], eager[2]) < 1e-4
