"""The operators under the public functions, and their autograd: gather, call; call, reduce.

    slattn::distributed_forward     agree (where torch.compile traced the call), gather, slattn.sparse_attention
    slattn::distributed_backward    gather again, slattn.sparse_attention_backward, reduce

The collectives stand inside operators because autograd and torch.compile must not reach between them and the sums
that they carry. `GatheredKeys` is the same in two steps, each in an autograd node of its own, so that other nodes run
while a collective is under way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
    """This rank's own arguments, checked; raises TypeError, ValueError, BackendRefusal or NotImplementedError."""
    ops.refuse_transforms()
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


def undifferentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose gradients cannot be differentiated again, and say so.

    torch's once_differentiable lets that pass, as zero, where the gradients that come in carry no graph.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # as it is but for create_graph=True
            return results
        return _Undifferentiable.apply(torch.ones((), requires_grad=True), *results)

    return run


class _Undifferentiable(torch.autograd.Function):
    """Gradients, from a number that makes them require one."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *gradients: Any) -> tuple[Any, ...]:
        return tuple(None if x is None else x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("the backward of slattn.distributed.sparse_attention cannot be differentiated again")


def no_forward_mode(ctx: Any, *_: Any) -> Any:
    """The jvp of a Function that has none."""
    raise NotImplementedError("slattn.distributed.sparse_attention has no forward-mode derivative")


class _Attend(torch.autograd.Function):
    """Call, save, call."""

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
        out, lse, *kept = ops.below_autograd(torch.ops.slattn.distributed_forward.default, keyset, arguments)
        ctx.save_for_backward(*arguments[:5], out, lse, *kept)
        ctx.settings = arguments[5:]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        return out, lse, *kept

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved, (_, need_q, need_kv, _, need_sink) = ctx.saved_tensors, ctx.needs_input_grad[:5]
        if grad_out is None:
            grad_out = torch.zeros_like(saved[5])
        needs = [need_q, need_kv, need_sink]
        gradients = iter(torch.ops.slattn.distributed_backward(*saved, grad_out, grad_lse, *ctx.settings, needs))
        dq, dkv, dsink = (next(gradients) if need else None for need in needs)
        return None, dq, dkv, None, dsink, None, *(None for _ in ctx.settings)


def _forward_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
    if ops.differentiated(arguments):
        return _Attend.apply(keyset, *arguments)
    results: tuple[Tensor, ...] = ops.below_autograd(torch.ops.slattn.distributed_forward.default, keyset, arguments)
    return results


_library.impl("distributed_forward", _forward, "CompositeExplicitAutograd")
_library.impl("distributed_backward", _backward, "CompositeExplicitAutograd")
_library.impl("distributed_forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_fake("slattn::distributed_forward", _forward_fake, lib=_library)
torch.library.register_fake("slattn::distributed_backward", _backward_fake, lib=_library)
for _name in ("distributed_forward", "distributed_backward"):
    _library.impl(_name, ops.refuse_transforms, "FuncTorchBatched")
    _library.impl(_name, ops.refuse_transforms, "Batched")  # is_grads_batched of torch.autograd.grad

# Calls with one GatheredKeys whose sums of dkv travel while autograd goes on; a further one's is waited for at once.
EARLY_CALLS = 4


class Sum:
    """The sum of a call's dkv over the ranks, between that call's backward and kv's."""

    pending: Pending | None = None

    def take(self) -> Tensor:
        """It, once; another backward of the call puts another in its place, whether this was taken or not."""
        if self.pending is None:
            raise RuntimeError("the gradient of gathered keys was asked for twice, and made once")
        pending, self.pending = self.pending, None
        return pending.result()


class GatheredKeys:
    """All ranks' keys, being gathered: what `gather_keys` returns and `sparse_attention` takes in kv's place.

    It holds N * D elements until it is dropped. Use it in one forward pass, in as many calls as you like.
    """

    def __init__(self, kv: Tensor, dtype: torch.dtype, groups: Groups, shards: Shards, keep_gathered: bool) -> None:
        self.dtype, self.groups, self.shards, self.keep_gathered = dtype, groups, shards, keep_gathered
        # What travels, now and for the backward: kv itself, or a copy where it is not contiguous or of another dtype.
        self.local = kv.detach().reshape(kv.shape[0], kv.shape[-1]).to(dtype).contiguous()
        self._version = self._version_now()
        self._hub = _Hub.apply(kv, lse_dtype(dtype))
        self._calls = 0
        self._anchors: list[Tensor] = []
        self._sums: list[Sum] = []
        self._add_anchors(EARLY_CALLS)
        self.requires_grad = self._anchors[0].requires_grad
        self._pending: Pending | None = gather(self.local, groups, shards)
        self._keys: Tensor | None = None

    def keys(self) -> Tensor:
        """The keys, [N, D] in the global order; waits for them."""
        if self._keys is None:
            assert self._pending is not None
            self._keys, self._pending = self._pending.result(), None
        return self._keys

    def for_a_call(self) -> tuple[Tensor, Sum]:
        """What autograd sees of the keys in one more call, and where its backward leaves the sum of dkv."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._anchors[0], Sum()  # nobody will come back
        if self._calls == len(self._sums):
            self._add_anchors(1)
        self._calls += 1
        return self._anchors[self._calls - 1], self._sums[self._calls - 1]

    def check_unchanged(self) -> None:
        """Raise where what travelled has been changed in place, and a backward would gather other keys."""
        if self._version != self._version_now() and not (self.keep_gathered and self._keys is not None):
            raise RuntimeError(
                "kv was changed in place after gather_keys, or a tensor that shares its storage: gather it again, or "
                "change a copy"
            )

    def _version_now(self) -> int | None:
        return None if self.local.is_inference() else self.local._version  # what is made in inference mode has none

    def _add_anchors(self, count: int) -> None:
        sums = [Sum() for _ in range(count)]
        self._anchors += _Anchor.apply(self._hub, sums)
        self._sums += sums


class _Hub(torch.autograd.Function):
    """kv to what stands for it in the dtype that dkv is summed in, without memory; back, one rounding."""

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(ctx: Any, kv: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = kv.dtype
        ctx.set_materialize_grads(False)
        return kv.new_zeros((), dtype=dtype).expand(kv.shape)

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, total: Tensor | None) -> tuple[Tensor | None, None]:
        return None if total is None else total.to(ctx.dtype), None


class _Anchor(torch.autograd.Function):
    """The hub to numbers that stand for the gathered keys, one a call; back, the sums of the calls gone through.

    dkv itself passes by them, unrounded.
    """

    @staticmethod
    def forward(ctx: Any, hub: Tensor, sums: list[Sum]) -> tuple[Tensor, ...]:
        ctx.sums, ctx.shape = sums, hub.shape
        ctx.set_materialize_grads(False)
        return tuple(hub.new_zeros(()) for _ in sums)

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, *gone_through: Tensor | None) -> tuple[Tensor | None, None]:
        parts = [of.take() for of, gradient in zip(ctx.sums, gone_through, strict=True) if gradient is not None]
        return sum(parts[1:], parts[0]).view(ctx.shape) if parts else None, None


class AttendGathered(torch.autograd.Function):
    """`sparse_attention` with keys that are gathered already; backward only starts the sum of dkv."""

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        anchor: Tensor,
        attn_sink: Tensor | None,
        indices: Tensor,
        topk_length: Tensor | None,
        gathered: GatheredKeys,
        total: Sum,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        optional: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
        keys = gathered.keys()
        out, lse = ops.sparse_attention(q, keys, indices, return_lse=True, **optional, **options)
        kept = keys if gathered.keep_gathered else gathered.local
        ctx.save_for_backward(q, kept, attn_sink, indices, topk_length, out, lse, anchor)
        ctx.collectives, ctx.keep_gathered = (gathered.groups, gathered.shards), gathered.keep_gathered
        ctx.total, ctx.options = total, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, kept, attn_sink, indices, topk_length, out, lse, anchor = ctx.saved_tensors
        keys = kept
        if not ctx.keep_gathered:
            keys = gather(kept, *ctx.collectives).result()
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
            return dq, None, dsink, *(None,) * 5
        ctx.total.pending = reduce(dkv, *ctx.collectives)
        return dq, torch.zeros_like(anchor), dsink, *(None,) * 5
