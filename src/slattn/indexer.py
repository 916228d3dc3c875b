"""What trains a lightning indexer: the attention's own probabilities as its target, and the loss against them.

The sparse stage of DeepSeek-V3.2's training (its paper, section 2.1) brings the indexer's scores of the chosen slots,
as a distribution, close to the main attention's, summed over the heads and normalised:

    probs = attention_slot_probs(q, kv, indices, lse)      no gradient: it is the teacher
    loss = indexer_loss(scores, probs, valid=counts)       KL(probs / sum(probs) || softmax(scores)), over the rows

where counts says which slots count: (indices >= 0) & (indices < N), and within topk_length where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slattn import reference
from slattn.problem import describe, lse_dtype

REDUCTIONS = ("mean", "sum", "none")


def attention_slot_probs(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """The probability that each slot has in `sparse_attention`, summed over the heads, not normalised.

    Recomputed from the logits a few queries at a time: nothing of size T * H * K is ever stored. It carries no
    gradient. Under tensor parallelism the sum over the ranks' heads is the sum of the ranks' results.

    Args:
        q, kv, indices, scale, topk_length: as given to `sparse_attention`.
        lse: what it returned, `[T, H]` or `[B, S, H]`, float32 (float64 for float64 inputs): natural, keys only.
        attn_sink: with it the sink's share is missing from the sums, as it is from the output; without it each head's
            probabilities sum to one over the row.

    Returns:
        `[T, K]` or `[B, S, K]`, lse's dtype; 0 in a slot that does not count, and in an empty row.

    Raises:
        TypeError, ValueError: arguments that do not fit, as `sparse_attention`.
    """
    problem = describe(q, kv, indices, scale=scale, attn_sink=attn_sink, topk_length=topk_length)
    if not isinstance(lse, Tensor) or lse.dtype != lse_dtype(q.dtype):
        got = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
        raise TypeError(f"lse must be a {lse_dtype(q.dtype)} tensor; got {got}")
    if lse.shape != q.shape[:-1] or lse.device != q.device:
        raise ValueError(
            f"lse must be [.., H] = {list(q.shape[:-1])} on {q.device}; got {list(lse.shape)} on {lse.device}"
        )
    with torch.no_grad():
        probs = reference.slot_probs(
            problem,
            q.reshape(problem.batch, problem.queries, problem.heads, problem.head_dim),
            kv.to(q.dtype).reshape(problem.batch, problem.keys, problem.head_dim),
            indices.reshape(problem.batch, problem.queries, problem.slots),
            attn_sink,
            None if topk_length is None else topk_length.reshape(problem.batch, problem.queries),
            lse,
        )
    return probs.view(*q.shape[:-2], problem.slots)


def indexer_loss(
    scores: Tensor,
    probs: Tensor,
    *,
    valid: Tensor | None = None,
    reduction: str = "mean",
    tp_group: Any = None,
) -> Tensor:
    """KL(target || softmax(scores)) over the slots of each row, the target being probs, normalised.

    Differentiable in scores alone.

    Args:
        scores: the indexer's logits of the slots, `[.., K]`, any float dtype; computed in float32 (float64 in float64).
        probs: `attention_slot_probs` of the same slots, `[.., K]`. A row of zeros is empty and is worth nothing.
        valid: bool `[.., K]`: the slots that count; where it is False, or scores are -inf, a slot has no share. Without
            it every slot has one, holes and fillers too.
        reduction: "mean" over the rows that are not empty (0 if all are), "sum", or "none".
        tp_group: the process group over which the heads are sharded: probs are summed over it before they are
            normalised. Every rank of it must call.

    Returns:
        A scalar, or `[..]` for "none": nats.

    Raises:
        TypeError: scores or probs that are no float tensors, valid that is no bool tensor.
        ValueError: shapes that differ, or a reduction of another name.
    """
    for name, tensor in (("scores", scores), ("probs", probs)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a float tensor; got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if valid is not None and (not isinstance(valid, Tensor) or valid.dtype != torch.bool):
        raise TypeError(f"valid must be a bool tensor; got {getattr(valid, 'dtype', type(valid).__name__)}")
    for name, other in (("probs", probs), ("valid", valid)):
        if other is not None and other.shape != scores.shape:
            raise ValueError(f"{name} must have scores's shape, {list(scores.shape)}; got {list(other.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}; got {reduction!r}")
    inner = lse_dtype(torch.promote_types(scores.dtype, probs.dtype))
    target = probs.detach().to(inner)
    if tp_group is not None:
        target = target.clone()
        torch.distributed.all_reduce(target, group=tp_group)
    scores = scores.to(inner)
    if valid is not None:
        scores, target = scores.masked_fill(~valid, -torch.inf), target.masked_fill(~valid, 0.0)
    mass = target.sum(-1, keepdim=True)
    empty = mass == 0
    target = target / mass.masked_fill(empty, 1.0)
    log_scores = scores.masked_fill(empty, 0.0).log_softmax(-1)
    # A slot without target has no share, whatever its score: selected away, for 0 * -inf would be NaN.
    shares = torch.where(target > 0, target * (target.clamp_min(1e-38).log() - log_scores), 0.0)
    rows = shares.sum(-1)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / (~empty).sum().clamp_min(1)
