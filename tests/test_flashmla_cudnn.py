"""The vendor backend: with stand-ins for both libraries everywhere, with the libraries themselves on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import types
from dataclasses import replace

import pytest
import torch

import slattn
from slattn.backends import flashmla_cudnn, vendor_runtimes
from slattn.problem import Problem
from slattn.testing import CASES, Case, check, make_inputs, oracle, relative_error, run
from vendor_stand_ins import CudnnDsa, FlashMla

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
    """Answers and verdicts about a stand-in do not outlive a test."""
    if request.node.get_closest_marker("gpu"):
        return
    for cached in (
        vendor_runtimes.flash_mla,
        vendor_runtimes.cudnn_dsa,
        vendor_runtimes.ask,
        vendor_runtimes.takes_indexer_topk,
    ):
        cached.cache_clear()
    vendor_runtimes._verdicts.clear()


@pytest.fixture
def pair(monkeypatch):
    """Put stand-ins in place of the installed libraries, and let them run on this machine's CPU."""
    real = flashmla_cudnn.refusal

    def refusal(problem):
        return real(replace(problem, device=torch.device("cuda")))

    def install(**dialect):
        flash_mla, dsa = FlashMla(**dialect), CudnnDsa()
        monkeypatch.setattr(vendor_runtimes, "flash_mla", lambda: vendor_runtimes.Runtime(flash_mla.function))
        monkeypatch.setattr(vendor_runtimes, "cudnn_dsa", lambda: vendor_runtimes.Runtime(dsa))
        return flash_mla, dsa

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(vendor_runtimes, "self_test_failure", lambda *arguments: None)
    monkeypatch.setattr(flashmla_cudnn, "refusal", refusal)
    return install


def _problem(**changes) -> Problem:
    problem = Problem(1, 4, 40, 64, 128, 512, 512, 512**-0.5, torch.bfloat16, torch.device("cuda"), deterministic=False)
    return replace(problem, **changes)


def _checked(case: Case, backend: str, device: str) -> None:
    rows = check(case, backend, device)
    # Where cuDNN runs twice, for a second group of heads or for the gradient of lse, each part is rounded to bf16
    # (1.66e-3) before the sum is: sqrt(2.35^2 + 1.66^2) = 2.88 in place of 2.35 thousandths.
    slack = 1.25 if case.heads > 128 or case.grad_lse else 1.0
    bad = [f"{row.tensor} {row.error:.2e} > {row.budget:.2e}" for row in rows if row.error > slack * row.budget]
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
    problem = _problem(
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
    problem = _problem(queries=2, keys=150, heads=16, slots=64, device=torch.device("cpu"))
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


# What a FlashMLA is asked.


@pytest.mark.parametrize("base", [math.e, 2.0])
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("leaks", [True, False])
def test_the_dialect_is_found_by_asking_once(base, clears, leaks):
    flash_mla = FlashMla(base=base, clears=clears, leaks=leaks)
    dialect = vendor_runtimes.ask(flash_mla.function, torch.device("cpu"))
    assert dialect.nats == pytest.approx(math.log(base))
    assert dialect.clears_empty_rows is (clears and not leaks)
    calls = len(flash_mla.calls)
    vendor_runtimes.ask(flash_mla.function, torch.device("cpu"))
    assert len(flash_mla.calls) == calls == 1


@pytest.mark.parametrize("answer", [7.0, math.nan])
def test_any_other_answer_counts_as_natural(answer):
    def strange(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
        lse = torch.full(q.shape[:2], answer)
        return q[..., :d_v].clone(), lse, lse

    assert vendor_runtimes.ask(strange, torch.device("cpu")) == vendor_runtimes.Dialect(1.0, False)


def test_a_function_that_takes_one_shape_alone_counts_as_natural():
    def picky(q, *arguments, **keywords):
        raise AssertionError(q.shape)

    assert vendor_runtimes.ask(picky, torch.device("cpu")) == vendor_runtimes.Dialect(1.0, False)


def test_a_function_that_cannot_be_hashed_is_asked_each_time():
    @dataclasses.dataclass
    class StandIn:
        flash_mla: FlashMla

        def __call__(self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
            return self.flash_mla.function(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    for _ in range(2):
        assert vendor_runtimes.ask(StandIn(FlashMla(base=2.0)), torch.device("cpu")).nats == math.log(2.0)


def test_running_out_of_memory_is_no_answer():
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        vendor_runtimes.ask(full, torch.device("cpu"))


# Refusals.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device": torch.device("cpu")}, "on NVIDIA GPUs; the tensors are on cpu"),
        ({"dtype": torch.float16}, "take bfloat16; got torch.float16"),
        ({"head_dim": 256, "value_dim": 256}, "D = 512 or 576 with d_v = 512; got D = 256, d_v = 256"),
        ({"head_dim": 576, "value_dim": 576}, "got D = 576, d_v = 576"),
        ({"scale": -1.0}, "positive scale; got -1.0"),
        ({"deterministic": True}, "float32 atomics"),
        ({"batch": 2, "keys": 2**30}, "int32 over the whole batch; got 2 x 1073741824 keys"),
    ],
)
def test_refusals(changes, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert sentence in flashmla_cudnn.refusal(_problem(**changes))


def test_refuses_an_older_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "this GPU has 8.0" in flashmla_cudnn.refusal(_problem())


class _Broken(types.ModuleType):
    def __getattr__(self, name):
        raise SystemExit(f"no driver for {self.__name__}.{name}")


def _modules(monkeypatch, **modules):
    for name in ("flash_mla", "sgl_kernel", "sgl_kernel.flash_mla", "cudnn"):
        monkeypatch.setitem(sys.modules, name, modules.get(name.replace(".", "_")))


def test_whatever_an_import_raises_is_quoted_with_the_command_that_mends_it(monkeypatch):
    late = types.ModuleType("sgl_kernel.flash_mla")
    late._flashmla_import_error = OSError("libcudart.so.13: cannot open\nmore")
    _modules(monkeypatch, flash_mla=_Broken("flash_mla"), sgl_kernel_flash_mla=late, cudnn=_Broken("cudnn"))
    flash_mla, dsa = vendor_runtimes.flash_mla(), vendor_runtimes.cudnn_dsa()
    assert flash_mla.found is None
    assert "import of flash_mla raised SystemExit (no driver for flash_mla" in flash_mla.missing
    assert "import of sgl_kernel.flash_mla raised OSError (libcudart.so.13: cannot open)" in flash_mla.missing
    assert "pip install sglang-kernel" in flash_mla.missing
    assert dsa.found is None
    assert "import of cudnn raised SystemExit" in dsa.missing
    assert "pip install nvidia-cudnn-frontend" in dsa.missing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flashmla_cudnn.refusal(_problem()) == flash_mla.missing


def test_a_flashmla_of_2025_counts_as_missing(monkeypatch):
    old = types.ModuleType("flash_mla")
    old.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, d_v=512: None
    _modules(monkeypatch, flash_mla=old)
    assert "takes no attn_sink and topk_length" in vendor_runtimes.flash_mla().missing


def test_sglang_kernel_serves_where_flash_mla_is_missing(monkeypatch):
    module = types.ModuleType("sgl_kernel.flash_mla")
    module.flash_mla_sparse_fwd = FlashMla().function
    _modules(monkeypatch, sgl_kernel_flash_mla=module)
    assert vendor_runtimes.flash_mla() == vendor_runtimes.Runtime(module.flash_mla_sparse_fwd)


def test_nothing_is_imported_before_it_is_asked_for():
    importlib.reload(vendor_runtimes)
    assert not {"cudnn", "flash_mla", "sgl_kernel"} & set(sys.modules)


def test_forward_inside_a_capture_says_what_to_do_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="once before capturing"):
        vendor_runtimes.ask(FlashMla().function, torch.device("cuda"))


# The self-test.


def _self_test(flash_mla, dsa, **changes):
    def forward(*arguments):
        return flashmla_cudnn.forward(*arguments, sparse_fwd=flash_mla.function)

    def backward(*arguments, **keywords):
        return flashmla_cudnn.backward(*arguments, **keywords, sparse_bwd=dsa.sparse_attention_backward_wrapper)

    return vendor_runtimes.self_test(_problem(device=torch.device("cpu"), **changes), forward, backward)


@pytest.mark.parametrize("changes", [{}, {"heads": 8, "head_dim": 576, "slots": 1}, {"heads": 192, "slots": 160}])
def test_the_self_test_passes_what_is_right(changes):
    assert _self_test(FlashMla(), CudnnDsa(), **changes) is None


def test_the_self_test_refuses_wrong_numbers_and_errors():
    class Wrong(CudnnDsa):
        def sparse_attention_backward_wrapper(self, *arguments, **keywords):
            result = super().sparse_attention_backward_wrapper(*arguments, **keywords)
            return {**result, "dkv": result["dkv"] * 1.5}

    class Fails(CudnnDsa):
        def sparse_attention_backward_wrapper(self, *arguments, **keywords):
            raise RuntimeError("no kernel image")

    assert "dkv at D = 512 is off by 0.5" in _self_test(FlashMla(), Wrong())
    assert "raised RuntimeError: no kernel image" in _self_test(FlashMla(), Fails())
    assert "out at D = 512 is off by inf" in _self_test(FlashMla(leaks=True), CudnnDsa())


def test_the_self_test_runs_once_per_head_dimension(monkeypatch):
    flash_mla, dsa = FlashMla(), CudnnDsa()
    monkeypatch.setattr(vendor_runtimes, "flash_mla", lambda: vendor_runtimes.Runtime(flash_mla.function))
    monkeypatch.setattr(vendor_runtimes, "cudnn_dsa", lambda: vendor_runtimes.Runtime(dsa))
    for head_dim in (512, 576, 512):
        problem = _problem(device=torch.device("cpu"), head_dim=head_dim, slots=1)
        assert vendor_runtimes.self_test_failure(problem, flashmla_cudnn.forward, flashmla_cudnn.backward) is None
    assert len(dsa.calls) == 2


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
    reason = flashmla_cudnn.refusal(_problem(device=torch.device("cuda", torch.cuda.current_device())))
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_cases_on_the_gpu(case, cuda):
    _checked(case, "flashmla_cudnn", cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [8, 64, 128, 192])
def test_accuracy_on_the_gpu(heads, head_dim, cuda):
    inputs = make_inputs(Case("gpu", heads=heads, head_dim=head_dim, queries=64, keys=512, slots=256), cuda)
    got, want = run(inputs, "flashmla_cudnn"), oracle(inputs)
    dkv = 2.5e-3 if heads <= 128 else 3.0e-3  # two groups of heads, each rounded before the sum
    for name, budget in {"out": 2.1e-3, "lse": 5e-7, "dq": 2.27e-3, "dkv": dkv, "dsink": 4.5e-3}.items():
        assert relative_error(getattr(got, name), getattr(want, name)) <= budget, name


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
