"""The Megatron hook that trains the indexer: its choice of keys, and its loss against the attention's probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import slattn
from slattn import backends
from slattn.problem import describe

_SCORES = 2**26  # of one chunk of queries: float32, 256 MiB


def run_fused_qk_topk_with_loss(
    *,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    packed_seq_params: Any = None,
    cp_size: int = 1,
    **layout: Any,
) -> tuple[Tensor, None, Tensor] | None:
    """The indexer's choice and its loss: KL of its scores from the attention's own probabilities, over the slots.

    Args:
        q: `[sq, b, heads, d]`; k: `[skv, b, d]`; weights: `[sq, b, heads]`: the indexer's.
        index_topk: K.
        starts, ends: `[sq]`: the keys that a query may see.
        query, key: `[sq, b, np, D]` and `[skv, b, 1, D]`, the attention's; no gradient passes to them.

    Returns:
        (topk_indices int32 `[b, sq, K]`, None, the loss times loss_coeff); None for packed or context-parallel calls.
    """
    if packed_seq_params is not None or cp_size > 1 or key.shape[2] != 1 or starts.ndim != 1:
        return None
    main = query.detach().transpose(0, 1), key.detach().squeeze(2).transpose(0, 1)
    step = max(1, _SCORES // (q.shape[1] * q.shape[2] * k.shape[0]))
    parts = [
        checkpoint(
            _best, *(x.split(step)[i] for x in (q, weights, starts, ends)), k, index_topk, use_relu, use_reentrant=False
        )
        for i in range(-(-q.shape[0] // step))
    ]
    scores = torch.cat([part[0] for part in parts], dim=1)
    indices = torch.cat([part[1] for part in parts], dim=1)
    if not takes(*main, indices, scale=softmax_scale):
        return None
    with torch.no_grad():
        _, lse = slattn.sparse_attention(*main, indices, scale=softmax_scale, return_lse=True)
    probs = slattn.attention_slot_probs(*main, indices, lse, scale=softmax_scale)
    tp = pg_collection.tp if pg_collection is not None and pg_collection.tp.size() > 1 else None
    rows = slattn.indexer_loss(scores, probs, valid=indices >= 0, reduction="none", tp_group=tp)
    if query_valid_rows is not None:
        rows = rows * query_valid_rows
    count: Any = rows.numel() if query_valid_rows is None else query_valid_rows.sum().clamp_min(1)
    loss = rows.sum() if calculate_per_token_loss else rows.sum() / count
    return indices, None, loss * loss_coeff


def _best(
    q: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, k: Tensor, topk: int, use_relu: bool
) -> tuple[Tensor, Tensor]:
    """The largest scores of some queries, `[b, s, K]`, -inf where there is no key left, and their keys, there -1."""
    s = torch.einsum("sbhd,tbd->bsht", q.float(), k.float())
    s = torch.einsum("bsht,sbh->bst", s.relu() if use_relu else s, weights.float())
    position = torch.arange(k.shape[0], device=k.device)
    hidden = (position < starts[:, None]) | (position >= ends[:, None])
    scores, indices = s.masked_fill(hidden, -torch.inf).topk(min(topk, k.shape[0]))
    return scores, indices.masked_fill(scores == -torch.inf, -1).to(torch.int32)


def takes(q: Tensor, kv: Tensor, indices: Tensor, **settings: Any) -> bool:
    """Whether a kernel runs the call; on a CPU the reference, which is what there is."""
    try:
        problem = describe(q, kv, indices, **settings)
    except (TypeError, ValueError):
        return False
    names = ("tilelang", "flashmla_cudnn") if q.is_cuda else ("reference",)
    return any(backends.load(name).refusal(problem) is None for name in names)
