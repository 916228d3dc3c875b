"""The operators under the public functions, and their autograd: gather, call; call, reduce.

    slattn::distributed_forward     agree (where torch.compile traced the call), gather, slattn.sparse_attention
    slattn::distributed_backward    gather again, slattn.sparse_attention_backward, reduce

The collectives stand inside operators because autograd and torch.compile must not reach between them and the sums
that they carry. `GatheredKeys` is the same in two steps, each in an autograd node of its own, so that other nodes run
while a collective is under way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slattn import backends, ops
from slattn.distributed.agreement import BACKENDS, LAYOUTS, Header, agree, float_bits
from slattn.distributed.collectives import Groups, Pending, Shards, gather, reduce
from slattn.problem import FLOAT_DTYPES, describe, lse_dtype

_library = torch.library.Library("slattn", "FRAGMENT")
_settings = (
    "float? scale, SymInt? d_v, bool? deterministic, str backend, str[] groups, str layout, bool keep_gathered, "
    "bool[2] required, int[]? lengths"
)
_library.define(
    "distributed_forward(Tensor q, Tensor kv, Tensor indices, Tensor? attn_sink, Tensor? topk_length, "
    f"{_settings}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "distributed_backward(Tensor q, Tensor kv, Tensor indices, Tensor? attn_sink, Tensor? topk_length, Tensor out, "
    "Tensor lse, Tensor keys, Tensor all_lengths, Tensor grad_out, Tensor? grad_lse, "
    f"{_settings}, bool[3] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Settings(NamedTuple):
    """The arguments of a call that are no tensors, as the operators take them."""

    scale: float | None
    d_v: int | None
    deterministic: bool | None
    backend: str
    groups: list[str]
    layout: str
    keep_gathered: bool
    required: list[bool]  # whether kv wants a gradient, and whether anything does
    lengths: list[int] | None  # N_r of every rank, where the ranks have agreed; None: they do in the operator

    @property
    def attention(self) -> dict[str, Any]:
        """What goes on to `slattn.sparse_attention`."""
        names = ("scale", "d_v", "deterministic", "backend")
        return {name: getattr(self, name) for name in names}


def header(
    q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, topk_length: Tensor | None, settings: Settings
) -> Header:
    """This rank's own arguments, checked; raises TypeError, ValueError or BackendRefusal."""
    check_shard(settings.layout, {"q": q, "kv": kv, "attn_sink": attn_sink})
    if isinstance(q, Tensor) and q.dim() == 4:
        raise ValueError(
            f"q must be [T, H, D], without a batch dimension; got {list(q.shape)}: flatten the batch into the tokens, "
            "and add to the indices of each entry where its keys begin"
        )
    optional: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
    optional |= {name: value for name, value in settings.attention.items() if name != "backend"}
    problem = describe(q, kv, indices, **optional)
    # A refusal of one rank must come before the collectives. One for the number of all ranks' keys, not known yet,
    # comes after the gather, and on all ranks alike, as they have agreed on the backend.
    backends.choose(problem, backends.backend_name(settings.backend))
    return Header(
        rank=dist.get_rank(),
        tokens=problem.tokens,
        keys=problem.keys,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        dtype=FLOAT_DTYPES.index(problem.dtype),
        scale=float_bits(problem.scale),
        backend=BACKENDS.index(settings.backend),
        layout=LAYOUTS.index(settings.layout),
        keep_gathered=checked_bool("keep_gathered", settings.keep_gathered),
        kv_gradient=settings.required[0],
        any_gradient=settings.required[1],
    )


def check_shard(layout: str, tensors: dict[str, Any]) -> None:
    """Raise where a layout has no such name, or a tensor is no rank's own part."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}; got {layout!r}")
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise TypeError(f"{name} must be a plain tensor, this rank's part; got a DTensor: hand over its to_local()")


def checked_bool(name: str, value: object) -> bool:
    """The value; raises TypeError where it is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool; got {type(value).__name__}")
    return value


def _forward(
    q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, topk_length: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(*rest)
    groups, lengths = Groups.of(settings.groups), settings.lengths
    if lengths is None:
        failure, mine = None, Header(dist.get_rank(), failed=True)
        try:
            mine = header(q, kv, indices, attn_sink, topk_length, settings)
        except Exception as error:  # whatever it is, the others wait to hear of it
            failure = error
        lengths = list(agree(mine, failure, groups))
    local = kv.reshape(kv.shape[0], kv.shape[-1]).to(q.dtype)
    keys = gather(local, groups, Shards(tuple(lengths), settings.layout)).result()
    optional: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
    out, lse = ops.sparse_attention(q, keys, indices, return_lse=True, **optional, **settings.attention)
    if not settings.keep_gathered:
        keys = keys.new_empty(0, keys.shape[1])
    elif groups.group is None:
        keys = keys.clone()  # an operator's result is none of its arguments
    return out, lse, keys, torch.tensor(lengths, device="cpu")


def _backward(q: Tensor, kv: Tensor, indices: Tensor, *rest: Any) -> list[Tensor]:
    attn_sink, topk_length, out, lse, keys, all_lengths, grad_out, grad_lse = rest[:8]
    settings, needs = Settings(*rest[8:-1]), rest[-1]
    groups, shards = Groups.of(settings.groups), Shards(tuple(all_lengths.tolist()), settings.layout)
    if not settings.keep_gathered:
        keys = gather(kv.reshape(kv.shape[0], kv.shape[-1]).to(q.dtype), groups, shards).result()
    dq, dkv, dsink = ops.sparse_attention_backward(
        *(q, keys, indices, out, lse, grad_out),
        grad_lse=grad_lse,
        attn_sink=attn_sink,
        topk_length=topk_length,
        needs=tuple(needs),
        dkv_dtype=lse_dtype(q.dtype),
        **settings.attention,
    )
    if dkv is not None:
        dkv = reduce(dkv, groups, shards).result().to(kv.dtype).view(kv.shape)
    return [gradient for gradient in (dq, dkv, dsink) if gradient is not None]


def _forward_fake(q: Tensor, kv: Tensor, indices: Tensor, sink: Any, length: Any, *rest: Any) -> tuple[Tensor, ...]:
    settings = Settings(*rest)
    group = Groups.of(settings.groups).group
    value_dim = describe(q, kv, indices, d_v=settings.d_v).value_dim
    rows = torch.library.get_ctx().new_dynamic_size() if settings.keep_gathered else 0
    return (
        q.new_empty(*q.shape[:-1], value_dim),
        q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype)),
        q.new_empty(rows, q.shape[-1]),
        torch.empty(1 if group is None else dist.get_world_size(group), dtype=torch.int64, device="cpu"),
    )


def _backward_fake(q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x, need in zip((q, kv, attn_sink), rest[-1], strict=True) if need and x is not None]


class _Attend(torch.autograd.Function):
    """Call, save, call."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
        out, lse, *kept = ops.below_autograd(torch.ops.slattn.distributed_forward.default, keyset, arguments)
        ctx.save_for_backward(*arguments[:5], out, lse, *kept)
        ctx.settings = arguments[5:]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        return out, lse, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved, (_, need_q, need_kv, _, need_sink) = ctx.saved_tensors, ctx.needs_input_grad[:5]
        if grad_out is None:
            grad_out = torch.zeros_like(saved[5])
        needs = [need_q, need_kv, need_sink]
        gradients = iter(torch.ops.slattn.distributed_backward(*saved, grad_out, grad_lse, *ctx.settings, needs))
        dq, dkv, dsink = (next(gradients) if need else None for need in needs)
        return None, dq, dkv, None, dsink, None, *(None for _ in ctx.settings)


def _forward_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return _Attend.apply(keyset, *arguments)
    results: tuple[Tensor, ...] = ops.below_autograd(torch.ops.slattn.distributed_forward.default, keyset, arguments)
    return results


_library.impl("distributed_forward", _forward, "CompositeExplicitAutograd")
_library.impl("distributed_backward", _backward, "CompositeExplicitAutograd")
_library.impl("distributed_forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_fake("slattn::distributed_forward", _forward_fake, lib=_library)
torch.library.register_fake("slattn::distributed_backward", _backward_fake, lib=_library)


class GatheredKeys:
    """All ranks' keys, being gathered: what `gather_keys` returns and `sparse_attention` takes in kv's place.

    It holds N * D elements until it is dropped. Use it in one forward pass, in as many calls as you like.
    """

    def __init__(self, kv: Tensor, dtype: torch.dtype, groups: Groups, shards: Shards, keep_gathered: bool) -> None:
        self.local, self.dtype, self.groups, self.shards = kv.detach(), dtype, groups, shards
        self.keep_gathered = keep_gathered
        self.sums: list[Pending] = []  # of dkv over the ranks, under way between a call's backward and kv's
        self.anchor = _Anchor.apply(kv, self.sums)  # what autograd sees: dkv itself passes by it, unrounded
        self._pending: Pending | None = gather(self.local.reshape(kv.shape[0], kv.shape[-1]).to(dtype), groups, shards)
        self._keys: Tensor | None = None

    def keys(self) -> Tensor:
        """The keys, [N, D] in the global order; waits for them."""
        if self._keys is None:
            assert self._pending is not None
            self._keys, self._pending = self._pending.result(), None
        return self._keys


class _Anchor(torch.autograd.Function):
    """kv to a number that stands for its gathered keys; back, the sums that calls with them began."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, sums: list[Pending]) -> Tensor:
        ctx.sums, ctx.shape, ctx.dtype = sums, kv.shape, kv.dtype
        return kv.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        while ctx.sums:
            part = ctx.sums.pop(0).result()
            total = part if total is None else total + part
        return None if total is None else total.to(ctx.dtype).view(ctx.shape), None


class AttendGathered(torch.autograd.Function):
    """`sparse_attention` with keys that are gathered already; backward only starts the sum of dkv."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        anchor: Tensor,
        attn_sink: Tensor | None,
        indices: Tensor,
        topk_length: Tensor | None,
        gathered: GatheredKeys,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        optional: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
        keys = gathered.keys()
        out, lse = ops.sparse_attention(q, keys, indices, return_lse=True, **optional, **options)
        kept = keys if gathered.keep_gathered else gathered.local
        ctx.save_for_backward(q, kept, attn_sink, indices, topk_length, out, lse, anchor)
        ctx.collectives, ctx.keep_gathered = (gathered.groups, gathered.shards), gathered.keep_gathered
        ctx.sums, ctx.options = gathered.sums, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, kept, attn_sink, indices, topk_length, out, lse, anchor = ctx.saved_tensors
        keys = kept
        if not ctx.keep_gathered:
            keys = gather(kept.reshape(kept.shape[0], kept.shape[-1]).to(q.dtype), *ctx.collectives).result()
        dq, dkv, dsink = ops.sparse_attention_backward(
            *(q, keys, indices, out, lse),
            torch.zeros_like(out) if grad_out is None else grad_out,
            grad_lse=grad_lse,
            attn_sink=attn_sink,
            topk_length=topk_length,
            needs=ctx.needs_input_grad[:3],
            dkv_dtype=lse_dtype(q.dtype),
            **ctx.options,
        )
        if dkv is None:
            return dq, None, dsink, None, None, None, None
        ctx.sums.append(reduce(dkv, *ctx.collectives))
        return dq, torch.zeros_like(anchor), dsink, None, None, None, None
