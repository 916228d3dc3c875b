"""The public op: layouts, autograd in all its uses, torch.compile. Here on the reference; kernels: test_backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slattn import reference, select_backend, sparse_attention, sparse_attention_backward
from slattn.problem import Problem

T, H, D, N, K = 6, 4, 16, 20, 9


def inputs(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, indices with holes, sink; the first three as leaves of the flat layout, or with `lead` batch sizes."""
    q = torch.randn(*lead, T, H, D).to(dtype).requires_grad_()
    kv = torch.randn(*lead, N, D).to(dtype).requires_grad_()
    indices = torch.randint(-3, N + 1, (*lead, T, K), dtype=torch.int32)
    return q, kv, indices, torch.randn(H).requires_grad_()


def gradients(out: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, list[Tensor]]]:
    """What the reference is handed, forward and backward: the problem and the tensors of each call from now on."""
    calls: list[tuple[Problem, list[Tensor]]] = []

    def spied(true: Any) -> Any:
        def spy(problem: Problem, *args: Any, **kwargs: Any) -> Any:
            calls.append((problem, [x for x in args if isinstance(x, Tensor)]))
            return true(problem, *args, **kwargs)

        return spy

    for name in ("forward", "backward"):
        monkeypatch.setattr(reference, name, spied(getattr(reference, name)))
    return calls


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """The `needs` of every backward call that reaches the reference."""
    seen: list[tuple[bool, ...]] = []
    true_backward = reference.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["needs"])
        return true_backward(*args, **kwargs)

    monkeypatch.setattr(reference, "backward", backward)
    return seen


def test_batched_is_each_entry_alone():
    q, kv, indices, sink = inputs(3)
    length = torch.randint(K + 1, (3, T), dtype=torch.int32)
    out, lse = sparse_attention(q, kv, indices, attn_sink=sink, topk_length=length, return_lse=True)
    dq, dkv = gradients(out, q, kv)
    for b in range(3):
        one = [x[b].detach().requires_grad_() for x in (q, kv)]
        alone, alone_lse = sparse_attention(*one, indices[b], attn_sink=sink, topk_length=length[b], return_lse=True)
        torch.testing.assert_close(alone, out[b])
        torch.testing.assert_close(alone_lse, lse[b])
        torch.testing.assert_close(gradients(alone, *one), (dq[b], dkv[b]))


def test_ranks_and_index_dtypes_are_one_problem():
    q, kv, indices, _ = inputs()
    out = sparse_attention(q, kv, indices)
    dq, dkv = gradients(out, q, kv)
    middle = kv.detach()[:, None].requires_grad_()
    for keys, idx in ((kv, indices.long()), (middle, indices[:, None]), (middle, indices[:, None].long())):
        again = sparse_attention(q, keys, idx)
        assert torch.equal(again, out)
        grads = gradients(again, q, keys)
        assert torch.equal(grads[0], dq)
        assert grads[1].shape == keys.shape
        assert torch.equal(grads[1].view_as(dkv), dkv)


def test_int64_indices_are_not_cut():
    """2**32 + 3 is not key 3."""
    q, kv, _, _ = inputs()
    wide = torch.tensor([[1, 2**32 + 3, -(2**32) + 2, 2**62]]).expand(T, -1)
    assert torch.equal(sparse_attention(q, kv, wide), sparse_attention(q, kv, torch.ones(T, 1, dtype=torch.int32)))


def test_views_of_any_stride(monkeypatch: pytest.MonkeyPatch):
    """Slices of a fused projection, transposes, spaced columns; the incoming gradients too. Backends see none of it."""
    calls = _calls(monkeypatch)
    q, kv, indices, sink = inputs()
    length = torch.randint(K + 1, (T,), dtype=torch.int32)
    grad = torch.randn(T, H, D)
    out = sparse_attention(q, kv, indices, attn_sink=sink, topk_length=length)
    want = gradients(out, q, kv, sink, grad=grad)
    strided = [
        torch.randn(H, T, 2 * D).transpose(0, 1)[..., D:],
        torch.randn(D, N).T,
        torch.zeros(K, T, dtype=torch.int32).T,
        torch.randn(2 * H)[::2],
        torch.zeros(3 * T, dtype=torch.int32)[::3],
        torch.randn(T, D, H).mT,
    ]
    for view, x in zip(strided, (q, kv, indices, sink, length, grad), strict=True):
        assert not view.is_contiguous()
        view.copy_(x.detach())
    q2, kv2, indices2, sink2, length2, grad2 = strided
    leaves = [x.requires_grad_() for x in (q2, kv2, sink2)]
    again, lse = sparse_attention(q2, kv2, indices2, attn_sink=sink2, topk_length=length2, return_lse=True)
    assert torch.equal(again, out)
    assert again.is_contiguous()
    grads = torch.autograd.grad([again, lse], leaves, [grad2, torch.zeros(H, T).T])
    for got, expected in zip(grads, want, strict=True):
        torch.testing.assert_close(got, expected)
    assert len(calls) == 4
    assert all(x.is_contiguous() for _, tensors in calls for x in tensors)


def test_expanded_gradient():
    """.sum() sends a gradient of stride 0."""
    q, kv, indices, _ = inputs()
    out = sparse_attention(q, kv, indices)
    out.sum().backward(retain_graph=True)
    assert torch.equal(q.grad, gradients(out, q)[0])


def test_changing_the_output_in_place_is_caught():
    q, kv, indices, _ = inputs()
    out = sparse_attention(q, kv, indices)
    kept = out.clone()
    kept.mul_(2.0).sum().backward(retain_graph=True)  # a copy may change
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_changing_an_input_in_place_is_caught():
    q, kv, indices, _ = inputs()
    out = sparse_attention(q, kv, indices)
    indices.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_only_the_wanted_gradients_are_computed(wanted: tuple[int, ...], needs: list[tuple[bool, ...]]):
    q, kv, indices, sink = inputs()
    full = gradients(sparse_attention(q, kv, indices, attn_sink=sink), q, kv, sink)
    leaves = [x.detach().requires_grad_(bool(want)) for x, want in zip((q, kv, sink), wanted, strict=True)]
    sparse_attention(leaves[0], leaves[1], indices, attn_sink=leaves[2]).sum().backward()
    for leaf, want, grad in zip(leaves, wanted, full, strict=True):
        assert leaf.grad is None if not want else torch.allclose(leaf.grad, grad)
    assert needs[-1] == tuple(bool(want) for want in wanted)


def test_nothing_is_saved_where_no_gradient_is_wanted():
    q, kv, indices, sink = inputs()
    with torch.no_grad():
        assert sparse_attention(q, kv, indices, attn_sink=sink).grad_fn is None
    with torch.inference_mode():
        assert sparse_attention(q, kv, indices, attn_sink=sink).grad_fn is None
    assert sparse_attention(q.detach(), kv.detach(), indices, attn_sink=sink.detach()).grad_fn is None


def test_second_backward_of_a_retained_graph():
    q, kv, indices, _ = inputs()
    out = sparse_attention(q, kv, indices)
    out.sum().backward(retain_graph=True)
    first = q.grad.clone(), kv.grad.clone()
    out.sum().backward()
    torch.testing.assert_close((q.grad, kv.grad), (2 * first[0], 2 * first[1]))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_float32_keys_beside_bfloat16_queries():
    """They are rounded inside; their gradient is the float32 sum, which rounds to that of bfloat16 keys."""
    q, kv, indices, _ = inputs(dtype=torch.bfloat16)
    wide = (kv.detach().float() * (1 + 2.0**-12)).requires_grad_()  # rounds to kv
    out, wide_out = sparse_attention(q, kv, indices), sparse_attention(q, wide, indices)
    assert torch.equal(out, wide_out)
    (dkv,), (dwide,) = gradients(out, kv), gradients(wide_out, wide)
    assert (dkv.dtype, dwide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(dwide.bfloat16(), dkv)
    assert not torch.equal(dwide, dkv.float())  # it was not rounded


def test_backward_as_a_function(needs: list[tuple[bool, ...]]):
    q, kv, indices, sink = inputs(dtype=torch.bfloat16)
    out, lse = sparse_attention(q, kv, indices, attn_sink=sink, return_lse=True)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad([out, lse], [q, kv, sink], [grad, grad_lse])
    arguments = (q.detach(), kv.detach(), indices, out.detach(), lse.detach(), grad)
    options = {"grad_lse": grad_lse, "attn_sink": sink.detach()}
    for got, expected in zip(sparse_attention_backward(*arguments, **options), want, strict=True):
        assert torch.equal(got, expected)
    dq, dkv, dsink = sparse_attention_backward(
        *arguments, **options, needs=(False, True, False), dkv_dtype=torch.float32
    )
    assert dq is None
    assert dsink is None
    assert needs[-1] == (False, True, False)
    assert dkv.dtype == torch.float32
    assert torch.equal(dkv.bfloat16(), want[1])
    assert sparse_attention_backward(*arguments)[2] is None  # no sink, no gradient of it


def test_sum_of_many_queries_does_not_stall_in_bfloat16():
    """4096 contributions of 1 to one key: added up in bfloat16 they would stop at 256."""
    q = torch.zeros(4096, 1, D, dtype=torch.bfloat16)
    kv = torch.zeros(1, D, dtype=torch.bfloat16).requires_grad_()
    sparse_attention(q, kv, torch.zeros(4096, 1, dtype=torch.int32)).sum().backward()
    assert torch.equal(kv.grad, torch.full_like(kv, 4096.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sink_gradient_has_the_sinks_dtype(dtype: torch.dtype):
    q, kv, indices, sink = inputs(dtype=torch.bfloat16)
    sink = sink.detach().to(dtype).requires_grad_()
    assert gradients(sparse_attention(q, kv, indices, attn_sink=sink), sink)[0].dtype == dtype


def test_gradient_through_lse_alone_and_through_both():
    q, kv, indices, _ = inputs()
    out, lse = sparse_attention(q, kv, indices, return_lse=True)
    both = gradients(out.sum() + lse.sum(), q, kv)
    out, lse = sparse_attention(q, kv, indices, return_lse=True)
    parts = [torch.autograd.grad(x.sum(), [q, kv], retain_graph=True) for x in (out, lse)]
    torch.testing.assert_close(both, tuple(a + b for a, b in zip(*parts, strict=True)))
    assert all(part.any() for parts_of in parts for part in parts_of)


@pytest.mark.parametrize("queries", [0, 3])
@pytest.mark.parametrize("keys", [0, 5])
def test_no_queries_or_no_keys(queries: int, keys: int):
    q = torch.randn(queries, H, D, requires_grad=True)
    kv, sink = torch.randn(keys, D, requires_grad=True), torch.randn(H, requires_grad=True)
    indices = torch.zeros(queries, K, dtype=torch.int32)
    out, lse = sparse_attention(q, kv, indices, attn_sink=sink, return_lse=True)
    assert out.shape == (queries, H, D)
    assert lse.shape == (queries, H)
    grads = gradients(out, q, kv, sink)
    assert [x.shape for x in grads] == [q.shape, kv.shape, sink.shape]
    if not queries or not keys:
        assert not out.any()
        assert (lse == torch.inf).all()
        assert not any(x.any() for x in grads)


@pytest.fixture
def _deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic_algorithms")
def test_deterministic_default_follows_torch(monkeypatch: pytest.MonkeyPatch):
    calls = _calls(monkeypatch)
    q, kv, indices, _ = inputs()
    sparse_attention(q, kv, indices).sum().backward()
    sparse_attention(q, kv, indices, deterministic=False).sum().backward()
    assert [problem.deterministic for problem, _ in calls] == [True, True, False, False]


def test_deterministic_is_off_by_default_and_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch):
    calls = _calls(monkeypatch)
    q, kv, indices, _ = inputs()
    sparse_attention(q, kv, indices).sum().backward()
    out = sparse_attention(q, kv, indices, deterministic=True)
    out.sum().backward()
    assert [problem.deterministic for problem, _ in calls] == [False, False, True, True]


def test_select_backend_says_what_runs():
    q, kv, indices, sink = inputs()
    assert select_backend(q, kv, indices, attn_sink=sink) == "reference"
    assert select_backend(q, kv, indices, backend="reference") == "reference"
    with pytest.raises(ValueError, match="scale must be finite"):
        select_backend(q, kv, indices, scale=float("nan"))
