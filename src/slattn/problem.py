"""What one call is: every argument checked once, in one order, into a frozen record.

Below this module nobody checks shapes or dtypes again. The definition of the operation, and of each
argument, is docs/contract.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_HEADS = 256
MAX_KEYS = 2**31 - 1
LARGEST_SCALE = 3.4e38
LOG2E = math.log2(math.e)  # a log-sum-exp in base 2 is this times the natural one


class Problem(NamedTuple):
    """One call of the operation in its batched form: q [B, S, H, D], kv [B, N, D], indices [B, S, K]."""

    batch: int  # B, 1 for the flat layout
    queries: int  # S, per batch entry
    keys: int  # N, per batch entry
    heads: int  # H
    slots: int  # K
    head_dim: int  # D
    value_dim: int  # d_v
    scale: float
    dtype: torch.dtype  # of q, and of kv after rounding
    device: torch.device
    deterministic: bool

    @property
    def tokens(self) -> int:
        """T, the number of queries in the whole call."""
        return self.batch * self.queries


def describe(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int | None = None,
    deterministic: bool | None = None,
) -> Problem:
    """Check the arguments of a call and say what it is.

    Raises:
        TypeError: an argument that is no tensor or no number, or has a dtype the operation does not take.
        ValueError: a rank, size, value or device that does not fit the others.
    """
    check_tensor("q", q, FLOAT_DTYPES)
    check_tensor("kv", kv, FLOAT_DTYPES)
    check_tensor("indices", indices, (torch.int32, torch.int64))
    if kv.dtype != q.dtype and not (q.dtype == torch.bfloat16 and kv.dtype == torch.float32):
        raise TypeError(f"kv must have q's dtype, {q.dtype} (or be float32 beside a bfloat16 q); got {kv.dtype}")
    batch, lead, keys = _layout(q, kv, indices)
    heads, head_dim = q.shape[-2:]
    slots = indices.shape[-1]
    if slots < 1:
        raise ValueError(f"indices must have at least one slot a row (K >= 1); got {list(indices.shape)}")
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads; got {heads} in shape {list(q.shape)}")
    if head_dim < 1:
        raise ValueError(f"q must have a head dimension of at least 1; got shape {list(q.shape)}")
    if keys >= MAX_KEYS:
        raise ValueError(f"kv must have fewer than {MAX_KEYS} keys, so that int32 can name each; got {keys}")
    if d_v is None:
        d_v = default_value_dim(head_dim)
    elif isinstance(d_v, bool) or not isinstance(d_v, (int, torch.SymInt)):
        raise TypeError(f"d_v must be an int; got {type(d_v).__name__}")
    if not 1 <= d_v <= head_dim:
        raise ValueError(f"d_v must lie between 1 and D = {head_dim}; got {d_v}")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32, torch.bfloat16, q.dtype))
        _shape("attn_sink", attn_sink, "[H]", (heads,))
    if topk_length is not None:
        check_tensor("topk_length", topk_length, (torch.int32,))
        _shape("topk_length", topk_length, "[T]" if q.dim() == 3 else "[B, S]", lead)
    device = q.device
    for name, tensor in (
        ("kv", kv),
        ("indices", indices),
        ("attn_sink", attn_sink),
        ("topk_length", topk_length),
    ):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on q's device, {device}; got {tensor.device}")
    return Problem(
        batch=batch,
        queries=lead[-1],
        keys=keys,
        heads=heads,
        slots=slots,
        head_dim=head_dim,
        value_dim=d_v,
        scale=_scale(scale, head_dim),
        dtype=q.dtype,
        device=device,
        deterministic=_deterministic(deterministic),
    )


def check_backward(
    problem: Problem, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> None:
    """Check what a backward call brings beside the forward's arguments.

    Raises:
        TypeError: an argument that is no tensor or has the wrong dtype.
        ValueError: a shape or device that does not fit q.
    """
    lead = tuple(q.shape[:-1])
    rows = [
        ("out", out, (q.dtype,), "[.., H, d_v]", (*lead, problem.value_dim)),
        ("grad_out", grad_out, (q.dtype,), "[.., H, d_v]", (*lead, problem.value_dim)),
        ("lse", lse, (lse_dtype(q.dtype),), "[.., H]", lead),
    ]
    if grad_lse is not None:
        rows.append(("grad_lse", grad_lse, (lse_dtype(q.dtype),), "[.., H]", lead))
    for name, tensor, dtypes, form, shape in rows:
        check_tensor(name, tensor, dtypes)
        _shape(name, tensor, form, shape)
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device, {q.device}; got {tensor.device}")


def counting(indices: Tensor, keys: int, topk_length: Tensor | None) -> Tensor:
    """Bool, the shape of indices, `[.., K]`: whether a slot counts, the one predicate of docs/contract.md. keys: N."""
    counts = (indices >= 0) & (indices < keys)
    if topk_length is not None:
        slot = torch.arange(indices.shape[-1], device=indices.device)
        counts &= slot < topk_length.unsqueeze(-1)
    return counts


def default_value_dim(head_dim: int) -> int:
    """d_v where the caller gives none: at D = 576 the last 64 columns are a key's position, and no value."""
    return 512 if head_dim == 576 else head_dim


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, and of all arithmetic inside: float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    """The dtypes in words, each once."""
    return " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))


def int32_indices(indices: Tensor, keys: int) -> Tensor:
    """indices as contiguous int32; an int64 value that int32 cannot hold becomes -1, as it names no key."""
    if indices.dtype == torch.int32:
        return indices.contiguous()
    return torch.where((indices >= 0) & (indices < keys), indices, -1).to(torch.int32)


def _layout(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[int, tuple[int, ...], int]:
    """B, the shape of what has one value a query, and N; raises ValueError where the three do not fit one another."""
    if q.dim() == 3:
        batch = 1
        lead = tuple(q.shape[:1])
        kv_shapes, index_shapes = "[N, D] or [N, 1, D]", "[T, K] or [T, 1, K]"
        kv_fits = kv.dim() == 2 or (kv.dim() == 3 and kv.shape[1] == 1)
        indices_fit = indices.dim() == 2 or (indices.dim() == 3 and indices.shape[1] == 1)
        keys = kv.shape[0] if kv_fits else 0
    elif q.dim() == 4:
        batch, lead = q.shape[0], tuple(q.shape[:2])
        kv_shapes, index_shapes = "[B, N, D]", "[B, S, K]"
        kv_fits = kv.dim() == 3 and kv.shape[0] == batch
        indices_fit = indices.dim() == 3
        keys = kv.shape[1] if kv_fits else 0
    else:
        raise ValueError(f"q must be [T, H, D] or [B, S, H, D]; got shape {list(q.shape)}")
    if not kv_fits or kv.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"kv must be {kv_shapes} with D = {q.shape[-1]}"
            f"{f' and B = {batch}' if q.dim() == 4 else ''} to go with q {list(q.shape)}; got {list(kv.shape)}"
        )
    if not indices_fit or tuple(indices.shape[: len(lead)]) != lead:
        raise ValueError(
            f"indices must be {index_shapes}, one row for each query of q {list(q.shape)}; got {list(indices.shape)}"
        )
    return batch, lead, keys


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless it is a dense tensor of one of these dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {either(dtypes)}; got {value.dtype}")
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got {'a nested one' if value.is_nested else value.layout}")


def _shape(name: str, value: Tensor, form: str, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must be {form} = {list(expected)}; got {list(value.shape)}")


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"scale must be a Python number (a tensor would make the host wait); got {type(scale).__name__}"
        )
    if not -LARGEST_SCALE <= scale <= LARGEST_SCALE:  # NaN fails too; torch.compile cannot trace math.isfinite
        raise ValueError(f"scale must be finite and within float32; got {scale}")
    return float(scale)


def _deterministic(deterministic: bool | None) -> bool:
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None; got {type(deterministic).__name__}")
    return deterministic
