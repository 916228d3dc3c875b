"""The hooks of a Megatron DSA kernel backend, by slattn; None declines, and Megatron runs its own plain torch.

slattn.frameworks.megatron puts this module where `dsa_kernel_backend: tilelang` finds its hooks. There is no
`run_fused_dsa_attention` here: without it Megatron calls these three.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import slattn
from slattn.frameworks.megatron_indexer import run_fused_qk_topk_with_loss, takes

__all__ = ["run_fused_absorbed_sparse_attention", "run_fused_qk_topk", "run_fused_qk_topk_with_loss"]

_OWN = "megatron.core.transformer.experimental_attention_variant.dsa_tilelang_kernels"


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Sparse attention to latents: query `[sq, b, np, D]`, key `[skv, b, 1, D]`, topk_indices `[b, sq, K]`, all SBHD.

    Returns:
        `[sq, b, np, v_channels]`, 0 in a row that names nothing; None where no kernel takes the call.
    """
    if query.ndim != 4 or key.ndim != 4 or key.shape[2] != 1 or topk_indices.ndim != 3:
        return None
    q, kv = query.transpose(0, 1), key.squeeze(2).transpose(0, 1)
    lengths = None if topk_length is None else topk_length.to(torch.int32)
    if not takes(q, kv, topk_indices, scale=softmax_scale, topk_length=lengths, d_v=v_channels):
        return None
    out = slattn.sparse_attention(q, kv, topk_indices, scale=softmax_scale, topk_length=lengths, d_v=v_channels)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1).contiguous()


def run_fused_qk_topk(*, q: Tensor, **arguments: Any) -> Any:
    """Megatron's own TileLang indexer, which slattn does not replace."""
    return importlib.import_module(_OWN).run_fused_qk_topk(q=q, **arguments) if q.is_cuda else None
