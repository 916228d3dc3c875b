"""`sparse_attn_tilelang` as DeepSeek-V4's code in NeMo AutoModel and miles calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import slattn


def sparse_attn_tilelang(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
    reference_rounding: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """DeepSeek-V4's sparse MQA; differentiable in q, kv and attn_sink.

    Args:
        q: `[B, S, H, D]`, any head count.
        kv: `[B, N, D]`, q's dtype (or float32 beside bfloat16: its gradient then is the float32 sum).
        attn_sink: `[H]`, float32 or bfloat16: a logit per head that joins the denominator.
        topk_idxs: integer `[B, S, K]`; what is outside `[0, N)` names nothing.
        sm_scale: of the logits; default `D ** -0.5`.
        reference_rounding: the arithmetic of DeepSeek's released kernel. On a GPU the TileLang kernels' forward has
            it. The reference has it anyway: it scales and rounds each logit to float32 and takes the natural
            exponential of that.
        backend: `slattn.sparse_attention`'s.

    Returns:
        `[B, S, H, D]` in q's dtype, contiguous; 0 in an empty row.

    Raises:
        slattn.BackendRefusal: `backend` cannot run the call, or is FlashMLA's under reference_rounding.
    """
    if reference_rounding and backend == "flashmla_cudnn":
        raise slattn.BackendRefusal("reference_rounding is the tilelang backend's; FlashMLA has no such arithmetic")
    if reference_rounding and q.is_cuda and backend != "reference":
        return _ReferenceRounding.apply(q, kv, attn_sink, topk_idxs, sm_scale)
    out = slattn.sparse_attention(q, kv, topk_idxs, scale=sm_scale, attn_sink=attn_sink, backend=backend)
    assert isinstance(out, Tensor)
    return out


class _ReferenceRounding(torch.autograd.Function):
    """The TileLang kernels' forward with that rounding, and their backward, which takes its base-2 LSE."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, scale: float | None) -> Tensor:
        from slattn.automodel import tilelang_sparse_mla_fwd as kernels

        out, lse = kernels.sparse_mqa_fwd_interface(q, kv, attn_sink, topk_idxs, scale, reference_rounding=True)
        ctx.save_for_backward(q, kv, attn_sink, topk_idxs, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from slattn.automodel import tilelang_sparse_mla_bwd as kernels

        q, kv, attn_sink, topk_idxs, out, lse = ctx.saved_tensors
        dq, dkv, dsink = kernels.sparse_mqa_bwd_interface(q, kv, attn_sink, out, grad_out, topk_idxs, lse, ctx.scale)
        return dq, dkv, dsink.to(attn_sink.dtype), None, None
