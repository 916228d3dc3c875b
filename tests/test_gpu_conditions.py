"""The kernels under streams, devices, CUDA graphs and torch's modes. test_ops_modes.py has the same on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from slattn import BackendRefusal, attention_slot_probs, select_backend, sparse_attention
from slattn.backends import tilelang
from slattn.kernels.build import kernel
from slattn.testing import CASES, Case, Inputs, check, make_inputs, relative_error, run
from test_backends import run_or_skip

pytestmark = pytest.mark.gpu
BACKENDS = pytest.mark.parametrize("backend", ["tilelang", "flashmla_cudnn"])
CASE = Case("conditions", heads=64, queries=62, keys=300, slots=160, indices="empty rows", lengths="mixed")
NAMES = ("out", "lse", "dq", "dkv", "dsink")


def inputs_or_skip(backend: str, case: Case = CASE, device: str = "cuda") -> Inputs:
    """The inputs, once the backend has run them: its kernels are compiled."""
    inputs = make_inputs(case, device)
    run_or_skip(inputs, backend)
    torch.cuda.synchronize()
    return inputs


def assert_same(got: object, want: object) -> None:
    """Bit for bit, but for the two sums that atomics make."""
    for name in NAMES:
        x, y = getattr(got, name), getattr(want, name)
        if name in ("dkv", "dsink"):
            assert relative_error(x, y) < 1e-4, name
        else:
            assert torch.equal(x, y), name


def occupy(milliseconds: int = 200) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(milliseconds * 1_500_000)


@BACKENDS
def test_on_a_stream_while_the_default_one_is_busy(backend: str):
    """It neither waits for the default stream nor runs on it."""
    inputs = inputs_or_skip(backend)
    want = run(inputs, backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    occupy(2000)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(stream):
        got = run(inputs, backend)
        stream.synchronize()
        assert not busy.query(), "the call waited for the default stream, or the sleep was too short"
        assert_same(got, want)


@BACKENDS
def test_it_waits_for_what_its_own_stream_still_has_to_do(backend: str):
    """The inputs come into being behind a pause on the call's stream, and only there; the default one is idle."""
    inputs = inputs_or_skip(backend)
    want = run(inputs, backend)
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        late = replace(inputs, q=torch.zeros_like(inputs.q), indices=torch.full_like(inputs.indices, -1))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            occupy()
            late.q.copy_(inputs.q)
            late.indices.copy_(inputs.indices)
            got = run(late, backend)
        stream.synchronize()
        assert_same(got, want)


@BACKENDS
def test_backward_runs_on_the_stream_of_its_forward(backend: str):
    inputs = inputs_or_skip(backend)
    want = run(inputs, backend)
    stream = torch.cuda.Stream()
    q, kv = inputs.q.clone().requires_grad_(), inputs.kv.clone().requires_grad_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = sparse_attention(
            q, kv, inputs.indices, attn_sink=inputs.attn_sink, topk_length=inputs.topk_length, backend=backend
        )
    torch.cuda.current_stream().wait_stream(stream)
    occupy()
    dq, dkv = torch.autograd.grad(out, [q, kv], inputs.grad_out)
    torch.cuda.synchronize()
    assert torch.equal(dq, want.dq)
    assert relative_error(dkv, want.dkv) < 1e-4


@pytest.mark.gpu(2)
@BACKENDS
def test_tensors_on_another_device_than_the_current(backend: str):
    """Results there, equal, and not a byte allocated on the current device."""
    inputs = inputs_or_skip(backend)
    want = run(inputs, backend)
    there = replace(inputs, **{n: x.to("cuda:1") for n, x in vars(inputs).items() if isinstance(x, Tensor)})
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        got = run(there, backend)
        if backend == "tilelang":
            attention_slot_probs(there.q, there.kv, there.indices, got.lse, backend=backend)
        torch.cuda.synchronize(1)
        assert torch.cuda.max_memory_allocated(0) == before
        assert torch.cuda.current_device() == 0
    for name in NAMES:
        assert getattr(got, name).device == torch.device("cuda", 1), name
    assert_same(type(got)(**{name: getattr(got, name).to("cuda:0") for name in NAMES}), want)


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"grad_lse": True}, {"heads": 8}, {"head_dim": 576}], ids=str)
def test_a_graph_replays_with_rows_that_become_empty(backend: str, options: dict[str, object]):
    """Everything that decides what is done is read by the kernels: indices, lengths, sink."""
    inputs = inputs_or_skip(backend, replace(CASE, indices="holes", **options))
    live = replace(
        inputs,
        indices=inputs.indices.clone(),
        topk_length=inputs.topk_length.clone(),
        attn_sink=inputs.attn_sink.clone(),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(live, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(live, backend)
    slots = inputs.indices.shape[-1]
    for empty, length, sink in (
        ([], slots, 0.0),
        ([0, 17, 61], 1, torch.inf),
        (range(62), slots, -torch.inf),
        ([], 0, 1.0),
    ):
        live.indices.copy_(inputs.indices)
        live.indices[list(empty)] = -1
        live.topk_length.fill_(length)
        live.attn_sink.fill_(sink)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run(live, backend))


def test_a_graph_of_the_deterministic_backward():
    inputs = make_inputs(replace(CASE, indices="holes"), "cuda")
    try:
        want = run(inputs, "tilelang", deterministic=True)
    except BackendRefusal as refusal:
        pytest.skip(str(refusal))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, "tilelang", deterministic=True)
    graph.replay()
    torch.cuda.synchronize()
    for name in NAMES:
        assert torch.equal(getattr(captured, name), getattr(want, name)), name


def test_a_call_does_not_make_the_host_wait():
    inputs = inputs_or_skip("tilelang")
    with torch.cuda.device(inputs.q.device):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(inputs, "tilelang")
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@BACKENDS
def test_compiled_once_for_all_lengths(backend: str):
    """No graph break, one graph and one set of kernels over seven lengths; results as eager."""
    inputs_or_skip(backend, replace(CASE, lengths=None))
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def layer(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
        return sparse_attention(q * 2.0, kv, indices, attn_sink=sink, backend=backend) * 0.5

    compiled = kernel.cache_info().misses
    for queries, keys, slots in (
        (3, 7, 5),
        (64, 20, 9),
        (2, 31, 64),
        (96, 7, 65),
        (5, 5, 5),
        (13, 4, 6),
        (9, 800, 640),
    ):
        case = Case("compile", heads=64, queries=queries, keys=keys, slots=slots)
        x = make_inputs(case, "cuda")
        leaves = [t.clone().requires_grad_() for t in (x.q, x.kv, x.attn_sink)]
        got = layer(*leaves[:2], x.indices, leaves[2])
        want = sparse_attention(leaves[0] * 2.0, leaves[1], x.indices, attn_sink=leaves[2], backend=backend) * 0.5
        assert torch.equal(got, want)
        pairs = zip(
            torch.autograd.grad(got, leaves, x.grad_out), torch.autograd.grad(want, leaves, x.grad_out), strict=True
        )
        assert all(relative_error(a, b) < 1e-3 for a, b in pairs)
    assert counter.frame_count == 1
    assert kernel.cache_info().misses == compiled


@BACKENDS
def test_opcheck(backend: str):
    x = inputs_or_skip(backend)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.kv)]
    settings = (x.q.shape[-1] ** -0.5, x.grad_out.shape[-1], False, backend)
    arguments = (*leaves, x.indices, x.attn_sink, x.topk_length, *settings)
    # Two backwards differ in the order of their sums, which the test of gradients would take for an error.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.slattn.forward.default, arguments, test_utils=tests)
    with torch.no_grad():
        out, lse = torch.ops.slattn.forward(*arguments)
    saved = (x.q, x.kv, x.indices, x.attn_sink, x.topk_length, out, lse, x.grad_out, None)
    tail = (*settings, [True, True, True], torch.float32)
    torch.library.opcheck(torch.ops.slattn.backward.default, (*saved, *tail), test_utils=tests)


def call(x: Inputs, backend: str, *leaves: Tensor) -> Tensor:
    return sparse_attention(*leaves, x.indices, attn_sink=x.attn_sink, topk_length=x.topk_length, backend=backend)


@BACKENDS
def test_what_is_saved_may_go_to_the_host_and_come_back(backend: str):
    x = inputs_or_skip(backend)
    want = run(x, backend)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.kv)]
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = call(x, backend, *leaves)
    dq, dkv = torch.autograd.grad(out, leaves, x.grad_out)
    assert torch.equal(dq, want.dq)
    assert relative_error(dkv, want.dkv) < 1e-4


@BACKENDS
def test_checkpointing_two_micro_batches_with_indices_of_their_own(backend: str):
    batches = [inputs_or_skip(backend), make_inputs(CASE, "cuda", seed=1)]
    leaves = [[t.clone().requires_grad_() for t in (x.q, x.kv)] for x in batches]
    outs = [checkpoint(call, x, backend, *pair, use_reentrant=False) for x, pair in zip(batches, leaves, strict=True)]
    for x, out in zip(batches, outs, strict=True):
        out.backward(x.grad_out)
    for x, (q, kv) in zip(batches, leaves, strict=True):
        want = run(x, backend)
        assert torch.equal(q.grad, want.dq)
        assert relative_error(kv.grad, want.dkv) < 1e-4


@BACKENDS
@pytest.mark.parametrize("change", [lambda out, x: out.mul_(2.0), lambda out, x: x.indices.fill_(0)])
def test_a_change_in_place_is_caught(backend: str, change: Callable[[Tensor, Inputs], object]):
    x = inputs_or_skip(backend)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.kv)]
    out = call(x, backend, *leaves)
    change(out, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@BACKENDS
def test_autocast_changes_nothing(backend: str):
    x = inputs_or_skip(backend)
    want = run(x, backend)
    with torch.autocast("cuda", torch.float16):
        got = run(x, backend)
    assert_same(got, want)


def test_vmap_is_refused_in_a_sentence():
    x = inputs_or_skip("tilelang")
    with pytest.raises(NotImplementedError, match="batched layout"):
        torch.func.vmap(lambda q: sparse_attention(q, x.kv, x.indices))(torch.stack([x.q, x.q]))


def test_auto_takes_the_kernels():
    x = make_inputs(CASE, "cuda")
    assert select_backend(x.q, x.kv, x.indices) == "tilelang"


@pytest.mark.parametrize("within", [1, 64, tilelang.NEVER])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.heads > 32 and case.head_dim >= 512], ids=lambda case: case.name
)
def test_delta_within_the_hopper_backward_and_before_it(case: Case, within: int, monkeypatch: pytest.MonkeyPatch):
    """Which of the two a query takes goes by its number of slots; both have to be right for any.

    Of the cases named length-mixed, queries have 63, 64 and 65 slots; with 72 heads a block of the kernel before it has
    rows of two queries.
    """
    monkeypatch.setattr(tilelang, "DELTA_WITHIN", within)
    monkeypatch.setattr(tilelang, "_multiprocessors", lambda device: 2)
    assert [row.tensor for row in check(case, "tilelang", "cuda") if not row.passed] == []
