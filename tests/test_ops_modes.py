"""The op under torch's other modes: second and forward derivatives, autocast, compilation, checkpoints, hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from slattn import attention_slot_probs, sparse_attention, sparse_attention_backward
from test_ops import D, H, K, T, gradients, inputs


@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out: out.square().sum()])
def test_double_backward_is_refused(loss: Callable[[Tensor], Tensor]):
    """Also where the gradient of out carries no graph itself: the second derivative would silently be zero."""
    q, kv, indices, _ = inputs()
    (dq,) = torch.autograd.grad(loss(sparse_attention(q, kv, indices)), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        dq.square().sum().backward()


def test_forward_mode_is_refused():
    q, kv, indices, _ = inputs()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(
            lambda x: sparse_attention(x, kv.detach(), indices), (q.detach(),), (torch.ones_like(q.detach()),)
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda q, kv, rows: torch.func.vmap(lambda x: sparse_attention(x, kv, rows))(q),
        lambda q, kv, rows: torch.func.vmap(lambda x: sparse_attention_backward(x, kv, rows, x, x[..., 0], x))(q),
        lambda q, kv, rows: torch.func.vmap(lambda x: attention_slot_probs(x, kv, rows, x[..., 0]))(q),
        lambda q, kv, rows: torch.func.grad(lambda x: sparse_attention(x, kv, rows).sum())(q[0]),
        lambda q, kv, rows: torch.func.vmap(torch.func.grad(lambda x: sparse_attention(x, kv, rows).sum()))(q),
        lambda q, kv, rows: torch.autograd.grad(
            sparse_attention(q.requires_grad_()[0], kv, rows), q, q.detach(), is_grads_batched=True
        ),
    ],
    ids=["vmap", "vmap of the backward", "vmap of slot_probs", "func.grad", "vmap of grad", "batched gradients"],
)
def test_transforms_are_refused_in_a_sentence(call: Callable[[Tensor, Tensor, Tensor], object]):
    """torch would run vmap one call at a time, and stop a derivative with words about setup_context."""
    q, kv, indices, _ = (x.detach() for x in inputs(2))
    with pytest.raises(NotImplementedError, match=r"take the batched layout \[B, S, H, D\] for vmap"):
        call(q, kv[0], indices[0])


def test_the_plain_backward_takes_tensors_that_require_grad():
    q, kv, indices, sink = inputs()
    out, lse = sparse_attention(q, kv, indices, attn_sink=sink, return_lse=True)
    got = sparse_attention_backward(q, kv, indices, out, lse, torch.ones_like(out), attn_sink=sink)
    want = torch.autograd.grad(out.sum(), [q, kv, sink])
    for gradient, truth in zip(got, want, strict=True):
        assert not gradient.requires_grad
        torch.testing.assert_close(gradient, truth)


@pytest.mark.parametrize("needs", [None, (True,), "qks", (1, 1, 1), (True,) * 4])
def test_needs_are_three_bools(needs: object):
    q, kv, indices, _ = inputs()
    out, lse = sparse_attention(q, kv, indices, return_lse=True)
    with pytest.raises(TypeError, match="needs must be three bools"):
        sparse_attention_backward(q, kv, indices, out, lse, out, needs=needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype):
    q, kv, indices, sink = (x.detach().to(dtype) if x.is_floating_point() else x for x in inputs())
    leaves = [x.requires_grad_() for x in (q, kv, sink)]

    def step() -> tuple[Tensor, ...]:
        out, lse = sparse_attention(q, kv, indices, attn_sink=sink, return_lse=True)
        return out, lse, *torch.autograd.grad(out.float().square().sum(), leaves)

    want = step()
    with torch.autocast("cpu", torch.bfloat16):
        got = step()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_scale_that_changes_compiles():
    q, kv, indices, _ = inputs()
    compiled = torch.compile(
        lambda scale: sparse_attention(q, kv, indices, scale=scale), fullgraph=True, backend="eager"
    )
    for scale in (0.3, 0.5):
        assert torch.equal(compiled(scale), sparse_attention(q, kv, indices, scale=scale))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_two_micro_batches(use_reentrant: bool):
    """Both forwards run before the first backward, as in a pipeline."""
    q, kv, indices, sink = inputs()
    batches = [q, (q.detach() * 2.0).requires_grad_()]

    def layer(x: Tensor) -> Tensor:
        return sparse_attention(x.tanh(), kv, indices, attn_sink=sink)

    want = gradients(sum(layer(x).square().sum() for x in batches), *batches, kv, sink)
    outs = [checkpoint(layer, x, use_reentrant=use_reentrant) for x in batches]
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close((*(x.grad for x in batches), kv.grad, sink.grad), want)


def test_saved_tensor_hooks():
    """What is saved goes through the hooks: seven tensors, and none of them twice."""
    q, kv, indices, sink = inputs()
    length = torch.full((T,), K, dtype=torch.int32)
    want = gradients(sparse_attention(q, kv, indices, attn_sink=sink, topk_length=length), q, kv, sink)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = sparse_attention(q, kv, indices, attn_sink=sink, topk_length=length)
    assert len(packed) == 7
    for got, expected in zip(gradients(out, q, kv, sink), want, strict=True):
        assert torch.equal(got, expected)


def test_compiled_once_for_all_lengths():
    """No graph break, one compilation for the forward and backward over seven lengths; results as eager."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def layer(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
        out, lse = sparse_attention(q * 2.0, kv, indices, attn_sink=sink, return_lse=True)
        return out.sum(-1) + lse.clamp(max=1e3)

    for queries, keys, slots in ((3, 7, 5), (64, 20, 9), (2, 31, 64), (96, 7, 65), (5, 5, 5), (13, 4, 6), (9, 8, 7)):
        q, kv = torch.randn(queries, H, D, requires_grad=True), torch.randn(keys, D, requires_grad=True)
        indices, sink = torch.randint(-1, keys, (queries, slots)), torch.randn(H, requires_grad=True)
        got = layer(q, kv, indices, sink)
        out, lse = sparse_attention(q * 2.0, kv, indices, attn_sink=sink, return_lse=True)
        want = out.sum(-1) + lse.clamp(max=1e3)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients(got, q, kv, sink), gradients(want, q, kv, sink))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("lead", "dtype"), [((), torch.float32), ((2,), torch.bfloat16)])
def test_opcheck(lead: tuple[int, ...], dtype: torch.dtype):
    """torch.library's own checks: schema, fake kernels, autograd registration, ahead-of-time tracing."""
    q, kv, indices, sink = inputs(*lead, dtype=dtype)
    length = torch.full(q.shape[:-2], K, dtype=torch.int32)
    settings = (0.25, D, False, "reference")
    torch.library.opcheck(torch.ops.slattn.forward.default, (q, kv, indices, sink, length, *settings))
    torch.library.opcheck(torch.ops.slattn.forward.default, (q.detach(), kv.detach(), indices, None, None, *settings))
    with torch.no_grad():
        out, lse = torch.ops.slattn.forward(q, kv, indices, sink, length, *settings)
        saved = [x.detach() for x in (q, kv, indices, sink, length, out, lse)]
        for needs in ([True, False, True], [False, True, False]):
            tail = (*settings, needs, torch.float32)
            torch.library.opcheck(torch.ops.slattn.backward.default, (*saved, torch.randn_like(out), None, *tail))
