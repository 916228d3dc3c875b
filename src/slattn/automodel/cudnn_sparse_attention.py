"""Sparse latent attention with FlashMLA forward and cuDNN backward, for packed tokens.

Stands in for NeMo AutoModel's `nemo_automodel.components.models.common.cudnn_sparse_attention`: same names, same
arguments, same errors. The work, and every convention of the two libraries, is in slattn.backends.flashmla_cudnn;
the runtimes that it is given are this module's `_FLASH_MLA_SPARSE_FWD` and `_CUDNN_DSA`, looked up at each call, so
that what a test suite puts in their place is used.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slattn.backends import flashmla_cudnn, vendor_runtimes

_SUPPORTED_ATTENTION_HEAD_DIMS = (512, 576)
_VALUE_HEAD_DIM = 512
_FLASH_MLA_TOPK_ALIGNMENT = 512

_this: Any = sys.modules[__name__]  # through which the four names of `__getattr__` are read


def __getattr__(name: str) -> Any:
    """The runtimes, imported when first asked for: importing cudnn loads a compiler."""
    if name == "_HAS_CUDNN_DSA":
        return vendor_runtimes.cudnn_dsa().found is not None
    if name == "_CUDNN_DSA":
        return vendor_runtimes.cudnn_dsa().found
    if name == "_HAS_FLASH_MLA":
        return vendor_runtimes.flash_mla().found is not None
    if name == "_FLASH_MLA_SPARSE_FWD":
        return vendor_runtimes.flash_mla().found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_cudnn_sparse_attention_available() -> bool:
    """Whether both runtimes, cuDNN's backward and FlashMLA's forward, import."""
    return bool(_this._HAS_CUDNN_DSA and _this._HAS_FLASH_MLA)


def _require_available() -> None:
    """Raise RuntimeError, naming what is missing and how to install it, unless both runtimes import."""
    if is_cudnn_sparse_attention_available():
        return
    missing = []
    if not _this._HAS_CUDNN_DSA:
        missing.append(vendor_runtimes.cudnn_dsa().missing or "cudnn.DSA is switched off (_HAS_CUDNN_DSA)")
    if not _this._HAS_FLASH_MLA:
        missing.append(vendor_runtimes.flash_mla().missing or "FlashMLA is switched off (_HAS_FLASH_MLA)")
    raise RuntimeError(
        "cuDNN sparse attention requires both nvidia-cudnn-frontend, with its CuTe DSL, and FlashMLA. "
        + "; ".join(missing)
    )


def _require_cuda_tensors(operation: str, *tensors: torch.Tensor) -> tuple[int, int]:
    """The compute capability (major, minor) of the one CUDA device that all tensors are on.

    Args:
        operation: named in the errors.
        *tensors: of any shape and layout.

    Raises:
        RuntimeError: no tensor, a tensor that is not on a CUDA device, or a device older than SM90.
        ValueError: tensors on different CUDA devices.
    """
    if not tensors or not all(tensor.is_cuda for tensor in tensors):
        where = ", ".join(str(tensor.device) for tensor in tensors) or "none"
        raise RuntimeError(f"{operation} requires CUDA tensors; got {where}.")
    device = tensors[0].device
    for tensor in tensors[1:]:
        if tensor.device != device:
            raise ValueError(
                f"{operation} requires every tensor on the same CUDA device; got {device} and {tensor.device}."
            )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise RuntimeError(f"{operation} requires SM90 or later; {device} is SM{major}{minor}.")
    return major, minor


def _compact_and_sort_indices(indices: torch.Tensor, key_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring each row's keys into an ascending prefix.

    Args:
        indices: integer `[query_tokens, sparse_width]`, global key numbers; a value below 0 or not below `key_count`
            names nothing.
        key_count: rows of the flattened K/V tensor.

    Returns:
        int32 `[query_tokens, sparse_width]`, contiguous: the valid keys ascending, then -1; int32 `[query_tokens]`:
        how many are valid.
    """
    valid = (indices >= 0) & (indices < key_count)
    ascending = torch.where(valid, indices, key_count).sort(-1).values  # what names nothing goes last
    compact = torch.where(ascending < key_count, ascending, -1).to(torch.int32)
    return compact.contiguous(), valid.sum(-1, dtype=torch.int32)


def _padded_head_count(num_heads: int, major: int) -> int:
    """The head count that `num_heads` is padded to on a GPU of compute capability `major`.

    Raises:
        ValueError: a count that neither is a multiple of 64 (SM90; from SM100 on 64 or a multiple of 128) nor divides
            64 (from SM100 on 64 or 128).
    """
    units = (64,) if major < 10 else (64, 128)
    for unit in units:
        if 0 < num_heads <= unit and unit % num_heads == 0:
            return unit
    if num_heads > 0 and num_heads % units[-1] == 0:
        return num_heads
    raise ValueError(
        f"FlashMLA sparse prefill requires a head count that divides {units[-1]} or is a multiple of it; "
        f"got H={num_heads}. slattn.sparse_attention takes any count from 1 to 256."
    )


def _pad_attention_heads(
    q: torch.Tensor, attn_sink: torch.Tensor, padded_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append inert heads: queries of 0, sinks of -inf.

    Args:
        q: `[query_tokens, heads, head_dim]`.
        attn_sink: float32 `[heads]`.
        padded_heads: the head count wanted.

    Returns:
        `[query_tokens, padded_heads, head_dim]` and `[padded_heads]`; q and attn_sink themselves where there is
        nothing to pad.
    """
    extra = padded_heads - q.shape[1]
    if extra == 0:
        return q, attn_sink
    pad = torch.nn.functional.pad
    return pad(q, (0, 0, 0, extra)), pad(attn_sink, (0, extra), value=-math.inf)


class _CudnnSparseAttention(torch.autograd.Function):
    """FlashMLA's forward paired with cuDNN's backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv_latent: torch.Tensor,
        topk_indices: torch.Tensor,
        softmax_scale: float,
        padded_heads: int,
        topk_length: torch.Tensor | None,
        all_rows_nonempty: bool,
        valid_row_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """out bf16 `[query_tokens, heads, 512]`; arguments as `cudnn_sparse_attention` has them.

        Args:
            padded_heads: the head count that FlashMLA is given, from `_padded_head_count`.
        """
        heads, kv = q.shape[1], kv_latent.squeeze(1).contiguous()
        ctx.softmax_scale, ctx.all_rows_nonempty = softmax_scale, all_rows_nonempty
        ctx.launches = q.shape[0] > 0 and kv.shape[0] > 0
        if not ctx.launches:
            ctx.save_for_backward(q, kv)
            return q.new_zeros(q.shape[0], heads, _VALUE_HEAD_DIM)
        rows, lengths = _kernel_rows(topk_indices.squeeze(1), topk_length, kv.shape[0])
        no_sink = torch.full((heads,), -math.inf, dtype=torch.float32, device=q.device)
        padded_q, padded_sink = _pad_attention_heads(q.contiguous(), no_sink, padded_heads)
        out, lse = flashmla_cudnn.attend(
            _this._FLASH_MLA_SPARSE_FWD,
            padded_q,
            kv,
            rows,
            lengths,
            padded_sink,
            softmax_scale,
            may_be_empty=not all_rows_nonempty,
        )
        out, lse = out[:, :heads].contiguous(), lse[:, :heads].contiguous()
        ctx.save_for_backward(q, kv, out, lse, no_sink, rows, lengths, valid_row_indices)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the eight inputs: of q, of kv_latent `[key_tokens, 1, head_dim]`, then None.

        Args:
            grad_output: bf16 `[query_tokens, heads, 512]`, of any layout.
        """
        if not ctx.launches:
            q, kv = ctx.saved_tensors
            return torch.zeros_like(q), torch.zeros_like(kv).unsqueeze(1), *(None,) * 6
        q, kv, out, lse, sink, rows, lengths, chosen = ctx.saved_tensors
        per_row = [q, rows, lengths, out, lse, grad_output.contiguous()]
        if chosen is not None:  # the caller says which rows have keys: the others need no work
            if chosen.numel() == 0:
                return torch.zeros_like(q), torch.zeros_like(kv).unsqueeze(1), *(None,) * 6
            per_row = [x.index_select(0, chosen) for x in per_row]
        kernel_q, rows, lengths, out, lse, grad_output = per_row
        dq, dkv, _ = flashmla_cudnn.differentiate(
            _this._CUDNN_DSA.sparse_attention_backward_wrapper,
            *(kernel_q, kv, rows, lengths, sink, out, lse, grad_output),
            ctx.softmax_scale,
            may_be_empty=not ctx.all_rows_nonempty,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if chosen is not None:
            dq = torch.zeros_like(q).index_copy_(0, chosen, dq)
        return dq, dkv.to(kv.dtype).unsqueeze(1), *(None,) * 6


def _kernel_rows(
    indices: torch.Tensor, topk_length: torch.Tensor | None, key_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact rows, padded to FlashMLA's width, and their lengths, from `[query_tokens, sparse_width]` indices.

    Rows that come with a length are promised to be compact already; where they are not, the slots that name nothing
    are masked all the same, in the forward and in the backward.
    """
    if topk_length is not None:
        return flashmla_cudnn.compact_rows(indices[None], topk_length[None], key_count, _FLASH_MLA_TOPK_ALIGNMENT)
    rows, lengths = _compact_and_sort_indices(indices, key_count)
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _FLASH_MLA_TOPK_ALIGNMENT), value=-1), lengths


def cudnn_sparse_attention(
    q: torch.Tensor,
    kv_latent: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    all_rows_nonempty: bool = False,
    valid_row_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sparse latent attention of packed tokens; differentiable in q and kv_latent.

    Args:
        q: bf16 `[query_tokens, heads, head_dim]` on a CUDA device; head_dim 512 or 576.
        kv_latent: bf16 `[key_tokens, 1, head_dim]`: one row a key, its first 512 columns the value.
        topk_indices: int32 `[query_tokens, 1, sparse_width]`, global key numbers; -1, and whatever is not below
            key_tokens, names nothing.
        softmax_scale: of the logits.
        topk_length: int32 `[query_tokens]`, contiguous: how many first slots of a row count; the rows then have a
            compact ascending prefix of valid keys. Without it the rows are compacted and sorted here.
        all_rows_nonempty: every row has a key; saves clearing the rows that have none.
        valid_row_indices: int64 `[valid_query_tokens]`, contiguous: the rows that have a key; the backward runs on
            them alone, and dq of the others is 0. Needs topk_length.

    Returns:
        bf16 `[query_tokens, heads, 512]`, contiguous; 0 for a row without a key.

    Raises:
        RuntimeError: a runtime is missing, a tensor is not on a CUDA device, or the GPU is older than SM90.
        TypeError: a wrong dtype, a scale that is no finite number, or an all_rows_nonempty that is no bool.
        ValueError: a wrong rank, size, layout or device, a scale that is not positive, or a head count that FlashMLA
            cannot be given.
    """
    _require_available()
    major, _ = _require_cuda_tensors("cuDNN DSA sparse attention", q, kv_latent, topk_indices)
    _check_tensors(q, kv_latent, topk_indices)
    if not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be a finite Python float; got {type(softmax_scale).__name__}.")
    if not math.isfinite(softmax_scale):
        raise TypeError(f"softmax_scale must be a finite Python float; got {softmax_scale}.")
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be positive; got {softmax_scale}.")
    if not isinstance(all_rows_nonempty, bool):
        raise TypeError(f"all_rows_nonempty must be a bool; got {type(all_rows_nonempty).__name__}.")
    _check_metadata(q, topk_length, all_rows_nonempty, valid_row_indices)
    return _CudnnSparseAttention.apply(
        q.contiguous(),
        kv_latent.contiguous(),
        topk_indices.contiguous(),
        float(softmax_scale),
        _padded_head_count(q.shape[1], major),
        topk_length,
        all_rows_nonempty,
        valid_row_indices,
    )


def _check_tensors(q: torch.Tensor, kv_latent: torch.Tensor, topk_indices: torch.Tensor) -> None:
    if q.dtype != torch.bfloat16 or kv_latent.dtype != torch.bfloat16:
        raise TypeError(f"q and kv_latent must be bfloat16; got {q.dtype} and {kv_latent.dtype}.")
    if topk_indices.dtype != torch.int32:
        raise TypeError(f"topk_indices must be int32; got {topk_indices.dtype}.")
    if q.ndim != 3 or q.shape[-1] not in _SUPPORTED_ATTENTION_HEAD_DIMS:
        raise ValueError(
            f"q must have shape [query_tokens, heads, head_dim] with head_dim in {_SUPPORTED_ATTENTION_HEAD_DIMS}; "
            f"got {list(q.shape)}."
        )
    if kv_latent.ndim != 3 or tuple(kv_latent.shape[1:]) != (1, q.shape[-1]):
        raise ValueError(f"kv_latent must have shape [key_tokens, 1, {q.shape[-1]}]; got {list(kv_latent.shape)}.")
    if topk_indices.ndim != 3 or tuple(topk_indices.shape[:2]) != (q.shape[0], 1):
        raise ValueError(
            f"topk_indices must have shape [query_tokens, 1, sparse_width] with {q.shape[0]} query tokens; "
            f"got {list(topk_indices.shape)}."
        )
    if topk_indices.shape[-1] < 1:
        raise ValueError(f"sparse_width must be positive; got {topk_indices.shape[-1]}.")
    if kv_latent.shape[0] >= 2**31 - 1:
        raise ValueError(f"key_tokens must fit an int32 index, below 2**31 - 1; got {kv_latent.shape[0]}.")


def _check_metadata(
    q: torch.Tensor,
    topk_length: torch.Tensor | None,
    all_rows_nonempty: bool,
    valid_row_indices: torch.Tensor | None,
) -> None:
    if all_rows_nonempty and valid_row_indices is not None:
        raise ValueError("valid_row_indices must be None when all_rows_nonempty is true.")
    if topk_length is not None:
        _check_vector("topk_length", topk_length, torch.int32, q.device)
        if topk_length.shape[0] != q.shape[0]:
            raise ValueError(f"topk_length must have shape [{q.shape[0]}]; got {list(topk_length.shape)}.")
    if valid_row_indices is not None:
        if topk_length is None:
            raise ValueError("valid_row_indices requires precomputed topk_length metadata.")
        _check_vector("valid_row_indices", valid_row_indices, torch.int64, q.device)
        if valid_row_indices.shape[0] > q.shape[0]:
            raise ValueError(
                f"valid_row_indices cannot be longer than the queries, {q.shape[0]}; got {valid_row_indices.shape[0]}."
            )


def _check_vector(name: str, value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if value.ndim != 1 or value.dtype != dtype or value.device != device or not value.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous vector of {dtype} on the query device, {device}; got shape "
            f"{list(value.shape)}, strides {list(value.stride())}, {value.dtype}, {value.device}."
        )


__all__ = ["cudnn_sparse_attention", "is_cudnn_sparse_attention_available"]
