"""The operation over many processes: queries and keys split by position, heads split by rank, or both.

    sparse_attention -> _agree, one small exchange -> _Distributed -> gather keys -> slattn.sparse_attention
                                                                   <- reduce dkv <- slattn.sparse_attention_backward

It is apart from `slattn.ops` because autograd rounds a gradient to its input's dtype: only a Function that holds the
collectives can sum dkv over the ranks in float32 and round it once. Nothing imports it but its users.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slattn import ops
from slattn.problem import FLOAT_DTYPES, describe, lse_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

LAYOUTS = ("contiguous", "zigzag")
MESSAGE_BYTES = 256  # of a rank's own error, for the others to repeat


def sparse_attention(
    q: Tensor,
    kv: Tensor,
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
    compared in one small exchange a call, and the same ValueError rises on each: D, d_v, q's dtype, `scale`, `layout`,
    `keep_gathered`, whether kv requires a gradient, and whether anything does. T, H, K and `backend` may differ over
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
            not fit; all other ranks raise ValueError with its message.
        ValueError: ranks that do not agree; on every rank.
    """
    groups = _process_group("group", group), _process_group("tp_group", tp_group)
    failure, header = None, _Header(rank=dist.get_rank(), failed=True)
    try:
        header = _describe(q, kv, indices, attn_sink, topk_length, scale, d_v, deterministic, backend, layout)
        header = header._replace(keep_gathered=_bool("keep_gathered", keep_gathered))
        return_lse = _bool("return_lse", return_lse)
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure, header = error, header._replace(failed=True)
    lengths = _agree(header, failure, groups)
    settings = {"scale": scale, "d_v": d_v, "deterministic": deterministic, "backend": backend}
    plan = _Plan(*groups, _Shards(lengths, layout), keep_gathered, settings)
    out, lse = _Distributed.apply(q, kv.reshape(kv.shape[0], kv.shape[-1]), attn_sink, indices, topk_length, plan)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Shards:
    """Where each rank's keys stand: padded to the longest shard in the order of ranks, and in the global order."""

    lengths: tuple[int, ...]  # N_r
    layout: str

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def in_order(self) -> bool:
        """Whether the padded shards are the global order as they stand."""
        return self.layout == "contiguous" and len(set(self.lengths)) == 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first row among the padded shards, first row in the global order, rows), in the global order."""
        ranks, step = range(len(self.lengths)), self.longest
        pieces = [(rank * step, self.lengths[rank]) for rank in ranks]
        if self.layout == "zigzag":
            half = step // 2
            pieces = [(rank * step, half) for rank in ranks] + [(rank * step + half, half) for rank in reversed(ranks)]
        position = 0
        for first, rows in pieces:
            yield first, position, rows
            position += rows


@dataclass(frozen=True)
class _Plan:
    """One call's collectives, and what it hands on to `slattn.sparse_attention`."""

    group: ProcessGroup | None
    tp_group: ProcessGroup | None
    shards: _Shards
    keep_gathered: bool
    settings: dict[str, Any]

    def gather(self, kv: Tensor) -> Tensor:
        """Every rank's keys in the global order, [N, D], from this rank's [N_r, D]."""
        if self.group is None:
            return kv
        shards = self.shards
        padded = kv.contiguous()
        if len(kv) < shards.longest:  # all_gather wants equal shards
            padded = kv.new_zeros(shards.longest, kv.shape[1])
            padded[: len(kv)] = kv
        gathered = kv.new_empty(len(shards.lengths) * shards.longest, kv.shape[1])
        _all_gather(gathered, padded, self.group)
        if shards.in_order:
            return gathered
        return torch.cat([gathered[first : first + rows] for first, _, rows in shards.runs()])

    def reduce(self, dkv: Tensor) -> Tensor:
        """This rank's rows, [N_r, D], of the sum over all ranks of dkv, [N, D], in its dtype; may overwrite dkv."""
        dkv = dkv.contiguous()  # as collectives want it
        if self.group is not None:
            shards = self.shards
            padded = dkv
            if not shards.in_order:
                padded = dkv.new_zeros(len(shards.lengths) * shards.longest, dkv.shape[1])
                for first, position, rows in shards.runs():
                    padded[first : first + rows] = dkv[position : position + rows]
            dkv = dkv.new_empty(shards.longest, dkv.shape[1])
            _reduce_scatter(dkv, padded, self.group)
            dkv = dkv[: shards.lengths[dist.get_rank(self.group)]]
        if self.tp_group is not None:  # after the other, when a rank holds 1 / R of the rows
            dist.all_reduce(dkv, group=self.tp_group)
        return dkv


class _Distributed(torch.autograd.Function):
    """Gather, call, save; call, reduce. Its collectives depend on `plan` and on what `_agree` compared alone."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        attn_sink: Tensor | None,
        indices: Tensor,
        topk_length: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        keys = plan.gather(kv.to(q.dtype))
        optional: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
        out, lse = ops.sparse_attention(q, keys, indices, return_lse=True, **optional, **plan.settings)
        ctx.save_for_backward(q, keys if plan.keep_gathered else kv, attn_sink, indices, topk_length, out, lse)
        ctx.plan, ctx.kv_dtype = plan, kv.dtype
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, kept, attn_sink, indices, topk_length, out, lse = ctx.saved_tensors
        plan = ctx.plan
        keys = kept if plan.keep_gathered else plan.gather(kept.to(q.dtype))
        dq, dkv, dsink = ops.sparse_attention_backward(
            *(q, keys, indices, out, lse),
            torch.zeros_like(out) if grad_out is None else grad_out,
            grad_lse=grad_lse,
            attn_sink=attn_sink,
            topk_length=topk_length,
            needs=ctx.needs_input_grad[:3],
            dkv_dtype=lse_dtype(q.dtype),
            **plan.settings,
        )
        if dkv is not None:
            dkv = plan.reduce(dkv).to(ctx.kv_dtype)
        return dq, dkv, dsink, None, None, None


class _Header(NamedTuple):
    """What one rank tells the others of its call, in 64-bit integers."""

    rank: int
    failed: int = False  # its own arguments do not fit, and a message follows
    tokens: int = 0
    keys: int = 0
    head_dim: int = 0
    value_dim: int = 0
    dtype: int = 0
    scale: int = 0  # the bits of the float
    layout: int = 0
    keep_gathered: int = 0
    kv_gradient: int = 0
    any_gradient: int = 0


# What every rank must say alike: what it is called, and how its value is shown.
AGREED: dict[str, tuple[str, Callable[[int], object]]] = {
    "head_dim": ("D of q and kv", int),
    "value_dim": ("d_v", int),
    "dtype": ("q's dtype", lambda value: FLOAT_DTYPES[value]),
    "scale": ("scale", lambda value: struct.unpack("d", struct.pack("q", value))[0]),
    "layout": ("layout", lambda value: LAYOUTS[value]),
    "keep_gathered": ("keep_gathered", bool),
    "kv_gradient": ("whether kv requires a gradient", bool),
    "any_gradient": ("whether any of q, kv and attn_sink requires a gradient", bool),
}


def _describe(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    scale: float | None,
    d_v: int | None,
    deterministic: bool | None,
    backend: str,
    layout: str,
) -> _Header:
    """This rank's own arguments, checked; raises TypeError, ValueError or BackendRefusal."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}; got {layout!r}")
    for name, tensor in (("q", q), ("kv", kv), ("attn_sink", attn_sink)):
        if hasattr(tensor, "to_local"):
            raise TypeError(f"{name} must be a plain tensor, this rank's part; got a DTensor: hand over its to_local()")
    if isinstance(q, Tensor) and q.dim() == 4:
        raise ValueError(
            f"q must be [T, H, D], without a batch dimension; got {list(q.shape)}: flatten the batch into the tokens, "
            "and add to the indices of each entry where its keys begin"
        )
    optional: dict[str, Any] = {"scale": scale, "attn_sink": attn_sink, "topk_length": topk_length, "d_v": d_v}
    problem = describe(q, kv, indices, deterministic=deterministic, **optional)
    # A refusal must come before the collectives. The global number of keys is not known yet; no backend looks at it.
    ops.select_backend(q, kv, indices, deterministic=deterministic, backend=backend, **optional)
    required = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (kv, q, attn_sink)]
    return _Header(
        rank=dist.get_rank(),
        tokens=problem.tokens,
        keys=problem.keys,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        dtype=FLOAT_DTYPES.index(problem.dtype),
        scale=struct.unpack("q", struct.pack("d", problem.scale))[0],
        layout=LAYOUTS.index(layout),
        kv_gradient=required[0],
        any_gradient=any(required),
    )


def _agree(
    header: _Header, failure: Exception | None, groups: tuple[ProcessGroup | None, ProcessGroup | None]
) -> tuple[int, ...]:
    """N_r of each rank of `group`, once every rank of the mesh is known to want the same; raises on all or on none."""
    message = str(failure or "").encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    table = torch.tensor([*header, *struct.unpack(f"{MESSAGE_BYTES // 8}q", message)])[None]
    for group in groups:  # along the rows, then those rows along the columns: each rank hears of the whole mesh
        table = table if group is None else _exchange(table, group)
    if failure is not None:
        raise failure
    records = table.tolist()
    headers = [_Header(*record[: len(header)]) for record in records]
    for other, record in zip(headers, records, strict=True):
        if other.failed:
            text = struct.pack(f"{MESSAGE_BYTES // 8}q", *record[len(header) :]).rstrip(b"\0").decode(errors="ignore")
            raise ValueError(f"the arguments of rank {other.rank} do not fit: {text}")
    for field, (what, shown) in AGREED.items():
        _same(what, {other.rank: shown(getattr(other, field)) for other in headers}, "on every rank")
    group, tp_group = groups
    ranks, place = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sharing = [other.rank for other in headers[place::ranks]]
    if tp_group is not None and sharing != dist.get_process_group_ranks(tp_group):
        raise ValueError(
            "group and tp_group must be the two dimensions of one mesh; got "
            f"{dist.get_process_group_ranks(group)} and {dist.get_process_group_ranks(tp_group)}"
        )
    for first in range(ranks):  # ranks with the same place in `group`: they share queries and keys
        sharers = headers[first::ranks]
        _same("N of kv", {other.rank: other.keys for other in sharers}, "over tp_group")
        _same("T of q", {other.rank: other.tokens for other in sharers}, "over tp_group")
    lengths = tuple(other.keys for other in headers[:ranks])
    if LAYOUTS[header.layout] == "zigzag" and (len(set(lengths)) > 1 or lengths[0] % 2):
        raise ValueError(f"kv must have the same even number of keys on each rank for layout 'zigzag'; got {lengths}")
    return lengths


def _exchange(table: Tensor, group: ProcessGroup) -> Tensor:
    """The [n, fields] of every rank of the group, one under the other, on the CPU."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = None if on_cpu else torch.accelerator.current_accelerator()
    mine = table if device is None else table.to(device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(mine), mine.shape[1])
    _all_gather(everyone, mine, group)
    return everyone.cpu()


def _same(what: str, values: dict[int, object], where: str) -> None:
    """Raise unless the ranks' values are equal."""
    first: dict[object, int] = {}
    for rank, value in values.items():
        first.setdefault(value, rank)
    if len(first) > 1:
        got = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{what} must be the same {where}; got {got}")


def _process_group(name: str, group: Any) -> ProcessGroup | None:
    """The ProcessGroup behind an argument; raises as the public function says."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name} must be a DeviceMesh of one dimension; got {group.ndim}: slice it by name")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} must be a ProcessGroup, a DeviceMesh or None; got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must be a group that this process is in")
    return group


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool; got {type(value).__name__}")
    return value


def _all_gather(output: Tensor, mine: Tensor, group: ProcessGroup) -> None:
    # all_gather_into_tensor is deprecated where all_gather_single is there (torch 2.13).
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, mine, group=group)


def _reduce_scatter(output: Tensor, parts: Tensor, group: ProcessGroup) -> None:
    # gloo has it too, inside as an all_reduce; see _all_gather for the name.
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, parts, group=group)
