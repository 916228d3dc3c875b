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
import torch.distributed as dist
from torch import Tensor

from slattn import backends, ops
from slattn.groups import process_group
from slattn.problem import check_tensor, default_value_dim, describe, lse_dtype

REDUCTIONS = ("mean", "sum", "none")

_library = torch.library.Library("slattn", "FRAGMENT")
_library.define(
    "slot_probs(Tensor q, Tensor kv, Tensor indices, Tensor lse, Tensor? attn_sink, Tensor? topk_length, float scale, "
    "str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention_slot_probs(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The probability that each slot has in `sparse_attention`, summed over the heads, not normalised.

    Recomputed from the logits a few queries at a time: nothing of size T * H * K is ever stored. It carries no
    gradient. Under tensor parallelism the sum over the ranks' heads is the sum of the ranks' results.

    Args:
        q, kv, indices, scale, topk_length: as given to `sparse_attention`.
        lse: what it returned, `[T, H]` or `[B, S, H]`, float32 (float64 for float64 inputs): natural, keys only.
        attn_sink: with it the sink's share is missing from the sums, as it is from the output; without it each head's
            probabilities sum to one over the row.
        backend: "auto" (the first that does not refuse), "tilelang" or "reference". Each gives the same bits in every
            run, so there is no `deterministic`.

    Returns:
        `[T, K]` or `[B, S, K]`, lse's dtype; 0 in a slot that does not count, and in an empty row.

    Raises:
        TypeError, ValueError: arguments that do not fit, as `sparse_attention`.
        slattn.BackendRefusal: the backend that `backend` names cannot run this call; the message says why.
    """
    problem = describe(q, kv, indices, scale=scale, attn_sink=attn_sink, topk_length=topk_length)
    check_tensor("lse", lse, (lse_dtype(q.dtype),))
    if lse.shape != q.shape[:-1] or lse.device != q.device:
        raise ValueError(
            f"lse must be [.., H] = {list(q.shape[:-1])} on {q.device}; got {list(lse.shape)} on {lse.device}"
        )
    probs: Tensor = torch.ops.slattn.slot_probs(
        q, kv, indices, lse, attn_sink, topk_length, problem.scale, backends.backend_name(backend)
    )
    return probs


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
        valid: bool `[.., K]`: the slots that count; where it is False, a slot has no share. Without it every slot has
            one, holes and fillers too. A score of -inf leaves a slot out only where its target is 0; elsewhere the loss
            is infinite.
        reduction: "mean" over the rows that are not empty (0 if all are), "sum", or "none".
        tp_group: the ProcessGroup, or DeviceMesh of one dimension, over which the heads are sharded: probs are summed
            over it before they are normalised. Every rank of it must call.

    Returns:
        A scalar, or `[..]` for "none": nats.

    Raises:
        TypeError: scores or probs that are no float tensors, valid that is no bool tensor, tp_group that is no group.
        ValueError: shapes or devices that differ, a reduction of another name, a mesh of more dimensions, or a group
            without this process.
        RuntimeError: a tp_group where torch.distributed is not initialised.
    """
    for name, tensor in (("scores", scores), ("probs", probs)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a float tensor; got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if valid is not None and (not isinstance(valid, Tensor) or valid.dtype != torch.bool):
        raise TypeError(f"valid must be a bool tensor; got {getattr(valid, 'dtype', type(valid).__name__)}")
    for name, other in (("probs", probs), ("valid", valid)):
        if other is not None and (other.shape != scores.shape or other.device != scores.device):
            raise ValueError(
                f"{name} must have scores's shape and device, {list(scores.shape)} on {scores.device}; "
                f"got {list(other.shape)} on {other.device}"
            )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}; got {reduction!r}")
    inner = lse_dtype(torch.promote_types(scores.dtype, probs.dtype))
    target = probs.detach().to(inner)
    if tp_group is not None:
        target = target.clone()
        dist.all_reduce(target, group=process_group("tp_group", tp_group))
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


def _slot_probs(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    d_v = default_value_dim(q.shape[-1])  # no value is read
    problem, tensors = ops.contiguous(q, kv, indices, attn_sink, topk_length, scale, d_v, deterministic=False)
    tensors = ops.batched(problem, tensors)
    module = backends.load(backends.choose(problem, backend, "slot_probs"))
    probs = module.slot_probs(problem, *tensors, lse.contiguous().view(tensors[0].shape[:-1]))
    return torch.ops.aten._unsafe_view(probs, (*q.shape[:-2], problem.slots))


def _slot_probs_fake(q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, *arguments: Any) -> Tensor:
    return lse.new_empty(*q.shape[:-2], indices.shape[-1])


def _slot_probs_autograd(keyset: Any, *arguments: Any) -> Tensor:
    """No gradient passes, as the documentation says."""
    probs: Tensor = ops.below_autograd(torch.ops.slattn.slot_probs.default, keyset, arguments)
    return probs


_library.impl("slot_probs", _slot_probs, "CompositeExplicitAutograd")
_library.impl("slot_probs", _slot_probs_autograd, "Autograd", with_keyset=True)
_library.impl("slot_probs", ops.refuse_transforms, "FuncTorchBatched")
torch.library.register_fake("slattn::slot_probs", _slot_probs_fake, lib=_library)
