"""The public operation, its registration with torch.library, and its autograd.

    sparse_attention -> problem.describe -> torch.ops.slattn.forward -> backends.choose -> <backend>.forward

and back the same way. The registered operators take the caller's layout; only below them is a call brought into
its batched form, where no autograd pays for the views. They are registered through torch.library.Library because
a call with gradients costs half of what torch.library.custom_op's costs (docs/performance.md, "Host overhead").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slattn import backends
from slattn.problem import Problem, check_backward, describe, either, lse_dtype

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, kv, indices, attn_sink, topk_length

_library = torch.library.Library("slattn", "DEF")
_library.define(
    "forward(Tensor q, Tensor kv, Tensor indices, Tensor? attn_sink, Tensor? topk_length, float scale, int d_v, "
    "bool deterministic, str backend) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "backward(Tensor q, Tensor kv, Tensor indices, Tensor? attn_sink, Tensor? topk_length, Tensor out, Tensor lse, "
    "Tensor grad_out, Tensor? grad_lse, float scale, int d_v, bool deterministic, str backend, bool[3] needs, "
    "ScalarType dkv_dtype) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the keys that its row of `indices` names; differentiable.

    There is no causal flag: what a query may not see is left out of its row. The definition, with every special case,
    is docs/contract.md. Layouts: flat `[T, ...]` or batched `[B, S, ...]`.

    Args:
        q: queries, `[T, H, D]` or `[B, S, H, D]`, 1 to 256 heads. The kernels take bfloat16, with D = 64, 128, 256,
            512 or 576; the reference takes any float dtype and size.
        kv: one latent row a key, shared by all heads, `[N, D]`, `[N, 1, D]` or `[B, N, D]`: the key is the row, the
            value its first `d_v` columns. q's dtype, or float32 beside a bfloat16 q: rounded inside, and its
            gradient then is the float32 sum, not rounded.
        indices: int32 or int64, `[T, K]`, `[T, 1, K]` or `[B, S, K]`: the keys each query sees, local to its batch
            entry. A value below 0 or not below N means "nothing here"; a key named twice counts twice.
        scale: of the logits; default `D ** -0.5`.
        attn_sink: `[H]`, float32, bfloat16 or q's dtype: a logit per head, not scaled, that joins the softmax's
            denominator and carries no value. -inf means none.
        topk_length: int32 `[T]` or `[B, S]`: only that many first slots of a row count; clamped to `[0, K]`.
        d_v: columns of a row that are its value; default 512 where D is 576, otherwise D.
        return_lse: also return lse, which is differentiable too.
        deterministic: gradients equal bit for bit in every run; default `torch.are_deterministic_algorithms_enabled()`.
        backend: "auto" (the first that does not refuse), "tilelang", "flashmla_cudnn" or "reference".

    Returns:
        out, contiguous, `[T, H, d_v]` or `[B, S, H, d_v]` in q's dtype; with `return_lse` also lse, `[.., H]` float32
        (float64 for float64 inputs): natural logarithm of the sum over the keys alone, without the sink. A row in
        which no slot counts has out = 0 and lse = +inf.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong rank, size, value, device or backend name.
        slattn.BackendRefusal: the backend that `backend` names cannot run this call; the message says why.
    """
    problem = describe(
        q,
        kv,
        indices,
        scale=scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        d_v=d_v,
        deterministic=deterministic,
    )
    out, lse = torch.ops.slattn.forward(
        q,
        kv,
        indices,
        attn_sink,
        topk_length,
        problem.scale,
        problem.value_dim,
        problem.deterministic,
        backends.backend_name(backend),
    )
    return (out, lse) if return_lse else out


def sparse_attention_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    dkv_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `sparse_attention` as a plain function, without autograd.

    Autograd rounds a gradient to its input's dtype; this function is how to get the float32 dkv of bfloat16 keys.

    Args:
        q, kv, indices, scale, attn_sink, topk_length, d_v, deterministic, backend: as given to `sparse_attention`.
        out, lse: what `sparse_attention(..., return_lse=True)` returned.
        grad_out: gradient of out, its shape and dtype.
        grad_lse: gradient of lse, its shape and dtype; None means zero.
        needs: which of dq, dkv and dsink to compute; the others are None, and their work is not done.
        dkv_dtype: float32 (float64 for float64 inputs), or kv's dtype (the default).

    Returns:
        (dq, dkv, dsink): q's shape and dtype; kv's shape in `dkv_dtype`, summed in float32 and rounded once; `[H]` in
        attn_sink's dtype, None without a sink.

    Raises:
        As `sparse_attention`.
    """
    problem = describe(
        q,
        kv,
        indices,
        scale=scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        d_v=d_v,
        deterministic=deterministic,
    )
    check_backward(problem, q, out, lse, grad_out, grad_lse)
    inner = lse_dtype(q.dtype)
    if dkv_dtype not in (None, kv.dtype, inner):
        raise TypeError(f"dkv_dtype must be {either((kv.dtype, inner))}; got {dkv_dtype}")
    if not isinstance(needs, (tuple, list)) or len(needs) != 3 or not all(isinstance(need, bool) for need in needs):
        raise TypeError(f"needs must be three bools, for dq, dkv and dsink; got {needs!r}")
    wanted = (needs[0], needs[1], needs[2] and attn_sink is not None)
    with torch.no_grad():
        gradients = iter(
            torch.ops.slattn.backward(
                *(q, kv, indices, attn_sink, topk_length, out, lse, grad_out, grad_lse),
                *(problem.scale, problem.value_dim, problem.deterministic, backends.backend_name(backend), wanted),
                kv.dtype if dkv_dtype is None else dkv_dtype,
            )
        )
    dq, dkv, dsink = (next(gradients) if want else None for want in wanted)
    return dq, dkv, dsink


def contiguous(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    scale: float,
    d_v: int,
    deterministic: bool,
) -> tuple[Problem, Tensors]:
    """The problem, and the arguments in the caller's layout, contiguous, kv in q's dtype."""
    queries, heads, head_dim = q.shape[-3:]
    batch = q.shape[0] if q.dim() == 4 else 1
    keys = kv.shape[1] if q.dim() == 4 else kv.shape[0]
    slots = indices.shape[-1]
    problem = Problem(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        slots=slots,
        head_dim=head_dim,
        value_dim=d_v,
        scale=scale,
        dtype=q.dtype,
        device=q.device,
        deterministic=deterministic,
    )
    return problem, (
        q.contiguous(),
        (kv if kv.dtype == q.dtype else kv.to(q.dtype)).contiguous(),
        indices.contiguous(),
        None if attn_sink is None else attn_sink.contiguous(),
        None if topk_length is None else topk_length.contiguous(),
    )


def batched(problem: Problem, tensors: Tensors) -> Tensors:
    """The arguments that `contiguous` gives, in the batched form."""
    q, kv, indices, attn_sink, topk_length = tensors
    lead = problem.batch, problem.queries
    return (
        q.view(*lead, problem.heads, problem.head_dim),
        kv.view(problem.batch, problem.keys, problem.head_dim),
        indices.view(*lead, problem.slots),
        attn_sink,
        None if topk_length is None else topk_length.view(lead),
    )


def _forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    scale: float,
    d_v: int,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem, tensors = contiguous(q, kv, indices, attn_sink, topk_length, scale, d_v, deterministic)
    module = backends.load(backends.choose(problem, backend))
    if getattr(module, "ANY_LAYOUT", False):
        results: tuple[Tensor, Tensor] = module.forward(problem, *tensors)
        return results
    out, lse = module.forward(problem, *batched(problem, tensors))
    # A view would be tied to its base, and a change in place by the caller would raise an error that speaks of views.
    shape = q.shape[:-1]
    return torch.ops.aten._unsafe_view(out, (*shape, d_v)), torch.ops.aten._unsafe_view(lse, shape)


def _backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    scale: float,
    d_v: int,
    deterministic: bool,
    backend: str,
    needs: list[bool],
    dkv_dtype: torch.dtype,
) -> list[Tensor]:
    problem, tensors = contiguous(q, kv, indices, attn_sink, topk_length, scale, d_v, deterministic)
    tensors = batched(problem, tensors)
    lead = tensors[0].shape[:-1]
    dq, dkv, dsink = backends.load(backends.choose(problem, backend)).backward(
        problem,
        *tensors,
        out.contiguous().view(*lead, d_v),
        lse.contiguous().view(lead),
        grad_out.contiguous().view(*lead, d_v),
        None if grad_lse is None else grad_lse.contiguous().view(lead),
        needs=tuple(needs),
        dkv_dtype=dkv_dtype,
    )
    gradients = []
    if needs[0]:
        gradients.append(dq.view(q.shape))
    if needs[1]:
        gradients.append(dkv.view(kv.shape))
    if needs[2] and attn_sink is not None:
        gradients.append(dsink.to(attn_sink.dtype))
    return gradients


def _forward_fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    d_v = arguments[5]
    return q.new_empty(*q.shape[:-1], d_v), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


def _backward_fake(q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, *arguments: Any) -> list[Tensor]:
    needs, dkv_dtype = arguments[-2:]
    gradients = []
    if needs[0]:
        gradients.append(q.new_empty(q.shape))
    if needs[1]:
        gradients.append(kv.new_empty(kv.shape, dtype=dkv_dtype))
    if needs[2] and attn_sink is not None:
        gradients.append(attn_sink.new_empty(attn_sink.shape))
    return gradients


class _SparseAttention(torch.autograd.Function):
    """Call, save, call: no arithmetic here."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = below_autograd(torch.ops.slattn.forward.default, keyset, arguments)
        ctx.save_for_backward(*arguments[:5], out, lse)
        ctx.settings = arguments[5:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, kv, indices, attn_sink, topk_length, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        _, need_q, need_kv, _, need_sink = ctx.needs_input_grad[:5]
        needs = (need_q, need_kv, need_sink)
        gradients = iter(
            torch.ops.slattn.backward(
                *(q, kv, indices, attn_sink, topk_length, out, lse, grad_out, grad_lse),
                *ctx.settings,
                needs,
                kv.dtype,
            )
        )
        dq, dkv, dsink = (next(gradients) if need else None for need in needs)
        return None, dq, dkv, None, dsink, None, *(None for _ in ctx.settings)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("slattn.sparse_attention has no forward-mode derivative")


class _Backward(torch.autograd.Function):
    """The backward where somebody may differentiate it again: it runs, and says no when that is tried."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(below_autograd(torch.ops.slattn.backward.default, keyset, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("the backward of slattn.sparse_attention cannot be differentiated again")


def below_autograd(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def differentiated(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd has to see a call of these arguments."""
    if torch.autograd.forward_ad._current_level >= 0:  # a Function refuses forward mode; below it tangents get lost
        return True
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def _forward_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    if differentiated(arguments):
        refuse_transforms()
        return _SparseAttention.apply(keyset, *arguments)
    return below_autograd(torch.ops.slattn.forward.default, keyset, arguments)


def _backward_autograd(keyset: Any, *arguments: Any) -> list[Tensor]:
    if differentiated(arguments):
        return list(_Backward.apply(keyset, *arguments))
    return below_autograd(torch.ops.slattn.backward.default, keyset, arguments)


def refuse_transforms(*arguments: Any) -> None:
    """Raise under vmap, where it is called with arguments, and under torch.func's other transforms."""
    if arguments or torch._C._are_functorch_transforms_active():
        instead = "the batched layout [B, S, H, D] for vmap, torch.autograd.grad for torch.func's derivatives"
        raise NotImplementedError(f"slattn runs under torch.autograd alone: take {instead}")


for _name, _kernel, _autograd, _fake in (
    ("forward", _forward, _forward_autograd, _forward_fake),
    ("backward", _backward, _backward_autograd, _backward_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)
    _library.impl(_name, refuse_transforms, "FuncTorchBatched")
    _library.impl(_name, refuse_transforms, "Batched")  # is_grads_batched of torch.autograd.grad
    torch.library.register_fake(f"slattn::{_name}", _fake, lib=_library)
