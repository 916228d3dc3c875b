"""The attention implementation "slattn" of slattn.frameworks.transformers, as transformers calls one.

DeepSeek-V4 has no indices to hand over: they are read from the mask, which holds the window and the compressor's
choice. The DSA models come with latents in place of keys and values: W_k is absorbed into the queries and W_v applied
to the result. Their indices name future keys in early rows, so they are filtered by the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import slattn


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query `[B, H, S, .]`, one key head `[B, 1, T, .]`, a mask `[B, 1, S, T]`.

    Returns:
        `[B, S, H, D]` and None: attention weights are not made.

    Raises:
        ValueError: dropout, a model of another kind, or a kv_b_proj that is no plain Linear and cannot be absorbed.
    """
    if dropout:
        raise ValueError(f"attn_implementation='slattn' has no attention dropout; got {dropout}")
    if key.shape[1] != 1:
        raise ValueError(f"attn_implementation='slattn' is for DeepSeek-V4 and DSA models; got {type(module).__name__}")
    kv = key.squeeze(1)
    if indices is None:
        slots = _slots_of(attention_mask, query, kv)
        out: Any = slattn.sparse_attention(query.transpose(1, 2), kv, slots, scale=scaling, attn_sink=s_aux)
        return out, None
    return _absorbed(module, query, kv, value.shape[-1], _visible(indices, attention_mask), scaling), None


def _allowed(mask: Tensor) -> Tensor:
    """`[B, S, T]`, True where a query may see a key; masks are bool, or added to the logits."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2


def _slots_of(mask: Tensor | None, query: Tensor, kv: Tensor) -> Tensor:
    """Int32 `[B, S, K]`: the keys that the mask lets each query see, ascending, padded with T, which names nothing.

    K is what the fullest row needs, for which the host waits.
    """
    batch, _, queries, _ = query.shape
    keys = kv.shape[1]
    if mask is None:
        return torch.arange(keys, dtype=torch.int32, device=kv.device).expand(batch, queries, keys)
    allowed = _allowed(mask).expand(batch, queries, keys)
    slots = max(1, int(allowed.sum(-1).max()))
    from_the_end = torch.arange(keys, 0, -1, dtype=torch.int32, device=kv.device)  # topk then gives the first keys
    return keys - torch.where(allowed, from_the_end, 0).topk(slots).values


def _visible(indices: Tensor, mask: Tensor | None) -> Tensor:
    """The indices `[B, S, K]` with -1 for those that the mask hides: in early rows the indexer names future keys."""
    if mask is None:
        return indices
    allowed = _allowed(mask).expand(*indices.shape[:2], -1).gather(-1, indices.long())
    return torch.where(allowed, indices, -1)


def _absorbed(module: Any, query: Tensor, kv: Tensor, rank: int, indices: Tensor, scale: float) -> Tensor:
    """`[B, S, H, v]` from query `[B, H, S, nope + rope]` and latents `[B, T, rank + rope]`, by kv_b_proj's weight."""
    if type(module.kv_b_proj) is not nn.Linear:
        raise ValueError(f"kv_b_proj must be a plain nn.Linear to be absorbed; got {type(module.kv_b_proj).__name__}")
    nope = module.qk_nope_head_dim
    w = module.kv_b_proj.weight.view(query.shape[1], nope + module.v_head_dim, rank)
    q_latent = torch.einsum("bhsd,hdr->bshr", query[..., :nope], w[:, :nope])
    q = torch.cat((q_latent, query[..., nope:].transpose(1, 2)), dim=-1)
    out = slattn.sparse_attention(q, kv, indices, scale=scale, d_v=rank)
    return torch.einsum("bshr,hvr->bshv", out, w[:, nope:])
