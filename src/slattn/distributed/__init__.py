"""The operation over many processes: queries and keys split by position, heads split by rank, or both.

    sparse_attention -> agree, one small exchange -> gather keys -> slattn.sparse_attention
                                                  <- reduce dkv <- slattn.sparse_attention_backward

It is apart from `slattn.ops` because autograd rounds a gradient to its input's dtype: only a Function that holds the
collectives can sum dkv over the ranks in float32 and round it once. Nothing imports it but its users.

agreement.py     what every rank must say alike
collectives.py   the gather, the reduction, and where each rank's keys stand
operators.py     the operators and their autograd
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slattn import ops
from slattn.distributed.agreement import CALLS, LAYOUTS, Header, agree
from slattn.distributed.collectives import Groups, Shards
from slattn.distributed.operators import (
    AttendGathered,
    GatheredKeys,
    Settings,
    check_shard,
    checked_bool,
    header,
)
from slattn.groups import process_group
from slattn.problem import FLOAT_DTYPES, either

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LAYOUTS", "GatheredKeys", "gather_keys", "sparse_attention"]


def sparse_attention(
    q: Tensor,
    kv: Tensor | GatheredKeys,
    indices: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    tp_group: ProcessGroup | DeviceMesh | None = None,
    scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    keep_gathered: bool = False,
    layout: str = "contiguous",
) -> Tensor | tuple[Tensor, Tensor]:
    """`slattn.sparse_attention` where each process has a part of the queries, keys or heads; differentiable once.

    Context parallel over `group`: each of its R ranks has some queries and some keys; the keys are gathered inside.
    Tensor parallel over `tp_group`: each of its ranks has some heads of the same queries, and the same keys. Both: the
    two are a row and a column of one 2-D mesh. In every case dkv is summed over the ranks in float32 (float64 for
    float64 inputs) and rounded once; with the same mesh, library versions and arguments, and with `deterministic`, its
    bits are the same in every run.

    A call is collective: every rank makes it, also one without queries or keys, and every rank runs its backward, so
    each rank's loss has to depend on the result (a sum over no queries will do). What must agree on every rank is
    compared in one small exchange a call, and the same ValueError rises on each: D, d_v, q's dtype, `scale`, `backend`,
    `layout`, `keep_gathered`, whether kv requires a gradient, and whether anything does. T, H and K may differ over
    `group`; T and N must not over `tp_group`. The host waits for that exchange. It goes between CPUs where the group
    has a backend for them ("gloo", "cpu:gloo,cuda:nccl"); in a group of NCCL alone the host waits for the device.

    Args:
        q: this rank's queries, `[T_r, H_r, D]`, T_r >= 0. Any queries: `layout` does not speak of them.
        kv: this rank's keys, `[N_r, D]` or `[N_r, 1, D]`, N_r >= 0, as q or float32 beside a bfloat16 q; they travel
            in q's dtype.
        indices: int32 or int64, `[T_r, K]` or `[T_r, 1, K]`: the keys that each query sees, by position in the global
            order. Anything outside it means "nothing here".
        group: ProcessGroup, or DeviceMesh of one dimension, over which queries and keys are split; None: they are not.
        tp_group: the same, over which heads are split; None: they are not.
        attn_sink: `[H_r]`: the sinks of this rank's heads. Its gradient is that of this rank's queries, as for any
            parameter: whatever averages or sums the model's other gradients over `group` has to do so with this one.
        topk_length: int32, `[T_r]`.
        keep_gathered: keep all keys from forward to backward, `N * D` elements, in place of gathering them again.
        layout: the global order. "contiguous": rank 0's keys, then rank 1's, and so on; the ranks may have different
            numbers of keys. "zigzag": it is cut into 2 R chunks of equal length, and rank r has chunk r followed by
            chunk 2 R - 1 - r; each N_r is the same even number.
        scale, d_v, return_lse, deterministic, backend: as for `slattn.sparse_attention`.

    Returns:
        out, contiguous, `[T_r, H_r, d_v]` in q's dtype; with `return_lse` also lse, `[T_r, H_r]`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: a group that is none, that this process is not in, or a mesh of more dimensions. These
            two lines are the errors that other ranks do not hear of: there is no group to tell them through.
        TypeError, ValueError, slattn.BackendRefusal: as `slattn.sparse_attention`, where this rank's own arguments do
            not fit; all other ranks raise ValueError with its message. Where the keys of all are too many for the
            backend, every rank raises for itself.
        ValueError: ranks that do not agree; on every rank.
        NotImplementedError: under torch.func's transforms; forward mode and a second derivative.
        RuntimeError: keys of gather_keys whose kv was changed in place since; on this rank, and ValueError on others.
        RuntimeError: a rank did not come, because it raised elsewhere, ended or hangs: after the timeout of the process
            group (`init_process_group(timeout=...)`; by default 30 minutes for gloo). In a group of NCCL alone NCCL's
            watchdog ends the process instead, with a message of its own (10 minutes).
    """
    gathered = kv if isinstance(kv, GatheredKeys) else None
    groups = gathered.groups if gathered else _groups(group, tp_group)
    local: Any = gathered.local if gathered else kv
    required = _required(gathered or kv, q, attn_sink)
    if torch.compiler.is_compiling():
        _untraced(gathered is not None)
        settings = Settings(scale, d_v, deterministic, backend, groups.names, layout, keep_gathered, required, None)
        out, lse, *_ = torch.ops.slattn.distributed_forward(q, local, indices, attn_sink, topk_length, *settings)
        return (out, lse) if return_lse else out
    failure: Exception | None = None
    mine = Header(dist.get_rank(), failed=True)
    if gathered is not None and (group, tp_group, layout, keep_gathered) == (None, None, "contiguous", False):
        layout, keep_gathered = gathered.shards.layout, gathered.keep_gathered
    elif gathered is not None:
        failure = ValueError("group, tp_group, layout and keep_gathered are gather_keys's where the keys come from it")
    settings = Settings(scale, d_v, deterministic, backend, groups.names, layout, keep_gathered, required, None)
    try:
        mine = header(q, local, indices, attn_sink, topk_length, settings)._replace(gathered=gathered is not None)
        return_lse = checked_bool("return_lse", return_lse)
        if gathered is not None:
            gathered.check_unchanged()
        if gathered is not None and gathered.dtype != q.dtype:
            raise TypeError(f"keys that travelled as {gathered.dtype} must have q's dtype, {q.dtype}: see gather_keys")
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = failure or error
    lengths = agree(mine if failure is None else mine._replace(failed=True), failure, groups)
    if gathered is not None:
        anchor, total = gathered.for_a_call()
        out, lse = AttendGathered.apply(
            *(q, anchor, attn_sink, indices, topk_length, gathered, total, settings.attention)
        )
    else:
        settings = settings._replace(lengths=list(lengths))
        out, lse, *_ = torch.ops.slattn.distributed_forward(q, kv, indices, attn_sink, topk_length, *settings)
    return (out, lse) if return_lse else out


def gather_keys(
    kv: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    tp_group: ProcessGroup | DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    keep_gathered: bool = False,
    layout: str = "contiguous",
) -> GatheredKeys:
    """Start to gather all ranks' keys, and return before they are there: `sparse_attention` takes the result for kv.

    Whatever a layer does between the two runs while the keys travel: its queries, its indexer, the choice of slots.
    Back, the sum of dkv over the ranks travels while the gradients of the same run. Only keys that are gathered again
    for the backward (without `keep_gathered`) are waited for. Collective, with an exchange of its own, as
    `sparse_attention` is; not to be traced by torch.compile.

    Args:
        kv, group, tp_group, keep_gathered, layout: as for `sparse_attention`, which is called without the last four.
        dtype: in which the keys travel, q's; default kv's. bfloat16 for a float32 kv beside bfloat16 queries.

    Raises:
        As `sparse_attention`.
    """
    _untraced(torch.compiler.is_compiling())
    groups = _groups(group, tp_group)
    failure, mine = None, Header(dist.get_rank(), failed=True)
    try:
        ops.refuse_transforms()
        check_shard(layout, {"kv": kv})
        dtype = _travels_as(kv, dtype)
        mine = Header(
            rank=dist.get_rank(),
            call=CALLS.index("gather_keys"),
            keys=len(kv),
            head_dim=kv.shape[-1],
            dtype=FLOAT_DTYPES.index(dtype),
            layout=LAYOUTS.index(layout),
            keep_gathered=checked_bool("keep_gathered", keep_gathered),
            kv_gradient=_required(kv)[0],
        )
    except Exception as error:
        failure = error
    shards = Shards(agree(mine, failure, groups), layout)
    assert dtype is not None
    return GatheredKeys(kv, dtype, groups, shards, keep_gathered)


def _travels_as(kv: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the gathered keys; raises where kv is none of this rank's keys."""
    if not isinstance(kv, Tensor) or kv.dtype not in FLOAT_DTYPES:
        raise TypeError(f"kv must be a float tensor; got {getattr(kv, 'dtype', type(kv).__name__)}")
    if not (kv.dim() == 2 or (kv.dim() == 3 and kv.shape[1] == 1)):
        raise ValueError(f"kv must be [N, D] or [N, 1, D]; got {list(kv.shape)}")
    allowed = (kv.dtype, torch.bfloat16) if kv.dtype == torch.float32 else (kv.dtype,)
    if dtype not in (None, *allowed):
        raise TypeError(f"dtype must be {either(allowed)}; got {dtype}")
    return kv.dtype if dtype is None else dtype


def _required(kv: object, *others: object) -> list[bool]:
    """Whether kv wants a gradient, and whether anything does."""
    wants = [getattr(x, "requires_grad", False) is True and torch.is_grad_enabled() for x in (kv, *others)]
    return [wants[0], any(wants)]


def _untraced(tried: bool) -> None:
    if tried:
        raise RuntimeError("gather_keys cannot be traced by torch.compile: hand kv itself to sparse_attention there")


def _groups(group: Any, tp_group: Any) -> Groups:
    return Groups(process_group("group", group), process_group("tp_group", tp_group))
