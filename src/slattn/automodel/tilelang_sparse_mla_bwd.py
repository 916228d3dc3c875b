"""Drop-in for NeMo AutoModel's `deepseek_v4.kernels.tilelang_sparse_mla_bwd`: the backward of DeepSeek-V4's sparse MQA.

Same names, parameters, order, defaults and meaning; the LSE that comes in is base 2 with the sink included, as the
forward's drop-in hands it out. B, S and S_kv are checked, never compiled for: another length compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slattn.automodel.tilelang_sparse_mla_fwd import describe_v4, masked_indices, refuse
from slattn.backends import tilelang
from slattn.problem import LOG2E, Problem

bfloat16, float32, int32 = "bfloat16", "float32", "int32"  # equal to TileLang's dtypes, which are str


def preprocess(
    B: int,
    S: int,
    H: int,
    D: int,
    block_ND: int = 32,
    num_stages: int = 5,
    dtype: str = bfloat16,
    accum_dtype: str = float32,
) -> Callable[[Tensor, Tensor], Tensor]:
    """kernel(o, do) -> delta: the row sums of o * do, fp32 `[B, S, H]`, from bf16 `[B, S, H, D]`.

    block_ND and num_stages are the original's; this kernel reads a row once, and has neither.

    Raises:
        ValueError: dtypes other than the defaults; the kernel, for tensors of another shape.
        TypeError: the kernel, for a wrong dtype.
        slattn.BackendRefusal: the kernel, where there is no CUDA device, no TileLang, or a D it does not take.
    """
    _dtypes(dtype, accum_dtype)

    @torch.no_grad()
    def kernel(o: Tensor, do: Tensor) -> Tensor:
        _shaped("o", o, (B, S, H, D), torch.bfloat16)
        _shaped("do", do, (B, S, H, D), torch.bfloat16, o.device)
        refuse(Problem(B, S, 0, H, 1, D, D, 1.0, o.dtype, o.device, False))
        return tilelang.delta_of(o.contiguous(), do.contiguous())

    return kernel


def bwd(
    B: int,
    S: int,
    S_kv: int,
    H: int,
    D: int,
    topk: int,
    sm_scale: float | None = None,
    block_size: int = 32,
    num_stages: int = 0,
    threads: int = 128,
    indices_dtype: str = int32,
    dtype: str = bfloat16,
    accum_dtype: str = float32,
) -> Callable[..., Tensor]:
    """The main kernel: adds into dkv and d_attn_sink, and returns dq.

    Returns:
        kernel(q, kv, do, attn_sink, topk_idxs, lse, delta, dkv, d_attn_sink) -> dq, or with valid_mask `[B, S, topk]`
        after topk_idxs. q, do, dq bf16 `[B, S, H, D]`; kv bf16 `[B, S_kv, D]`; topk_idxs `[B, S, topk]` of
        `indices_dtype`; lse (base 2, sink included) and delta fp32 `[B, S, H]`; attn_sink fp32 `[H]`; dkv fp32
        `[B, S_kv, D]` and d_attn_sink fp32 `[H]`, contiguous, are added to.

    Raises:
        ValueError: block_size, num_stages or threads that are set and that the kernel cannot have, or other dtypes;
            the kernel, for tensors of another shape.
        TypeError: the kernel, for a wrong count of arguments or a wrong dtype.
    """
    _dtypes(dtype, accum_dtype)
    if indices_dtype not in ("int32", "int64"):
        raise ValueError(f"indices_dtype must be int32 or int64; got {indices_dtype}")
    for name, value, default, kept in (
        ("block_size", block_size, 32, (64,)),
        ("num_stages", num_stages, 0, ()),
        ("threads", threads, 128, ()),
    ):
        if value != default and value not in kept:
            raise ValueError(
                f"{name} must be {' or '.join(map(str, (default, *kept)))}: the kernel takes 64 slots a step, gathers "
                f"into one buffer and has the threads its head tile needs; got {value}"
            )

    @torch.no_grad()
    def kernel(*arguments: Tensor) -> Tensor:
        if len(arguments) not in (9, 10):
            raise TypeError(
                "the kernel takes (q, kv, do, attn_sink, topk_idxs[, valid_mask], lse, delta, dkv, d_attn_sink); "
                f"got {len(arguments)} arguments"
            )
        q, kv, do, attn_sink, topk_idxs = arguments[:5]
        valid_mask = arguments[5] if len(arguments) == 10 else None
        lse, delta, dkv, d_attn_sink = arguments[-4:]
        _shaped("q", q, (B, S, H, D), torch.bfloat16)
        for name, tensor, shape, kind in (
            ("kv", kv, (B, S_kv, D), torch.bfloat16),
            ("do", do, (B, S, H, D), torch.bfloat16),
            ("topk_idxs", topk_idxs, (B, S, topk), getattr(torch, str(indices_dtype))),
            ("lse", lse, (B, S, H), torch.float32),
            ("delta", delta, (B, S, H), torch.float32),
            ("dkv", dkv, (B, S_kv, D), torch.float32),
            ("d_attn_sink", d_attn_sink, (H,), torch.float32),
        ):
            _shaped(name, tensor, shape, kind, q.device)
        problem = describe_v4(q, kv, attn_sink, topk_idxs, sm_scale, deterministic=None)
        if not (dkv.is_contiguous() and d_attn_sink.is_contiguous()):
            raise ValueError("dkv and d_attn_sink are added to in place and must be contiguous")
        sums = dkv if dkv.data_ptr() % 16 == 0 else torch.zeros_like(dkv)  # the kernel adds four numbers at a time
        dq, _ = tilelang.main_backward(
            problem,
            q.contiguous(),
            kv.contiguous(),
            masked_indices(topk_idxs, valid_mask),
            None,
            do.contiguous(),
            lse.contiguous(),
            delta.contiguous(),
            dkv=sums,
        )
        assert dq is not None
        if sums is not dkv:
            dkv += sums
        d_attn_sink += _sink_gradient(attn_sink, lse, delta)
        return dq

    return kernel


def postprocess(
    B: int,
    S_kv: int,
    D: int,
    block_N: int = 64,
    threads: int = 128,
    dtype: str = bfloat16,
    accum_dtype: str = float32,
) -> Callable[[Tensor], Tensor]:
    """kernel(dkv) -> dkv in bf16: the one rounding of the fp32 `[B, S_kv, D]`.

    block_N and threads are the original's; torch's own cast is as fast.

    Raises:
        ValueError: dtypes other than the defaults; the kernel, for a tensor of another shape.
    """
    _dtypes(dtype, accum_dtype)

    def kernel(dkv: Tensor) -> Tensor:
        _shaped("dkv", dkv, (B, S_kv, D), torch.float32)
        return dkv.to(torch.bfloat16)

    return kernel


def sparse_mqa_bwd_interface(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    o: Tensor,
    do: Tensor,
    topk_idxs: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    return_dkv_accum_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of DeepSeek-V4's sparse MQA.

    Args:
        q, o, do: bf16 `[B, S, H, D]`: queries, the forward's output, its gradient.
        kv: bf16 `[B, S_kv, D]`.
        attn_sink: fp32 `[H]`.
        topk_idxs: int32 `[B, S, topk]`.
        lse: fp32 `[B, S, H]`, base 2, sink included, as the forward gives it.
        sm_scale: of the logits; default `D ** -0.5`.
        return_dkv_accum_dtype: hand dkv out in fp32, not rounded.

    Returns:
        (dq, dkv, d_attn_sink): bf16 `[B, S, H, D]`; bf16 or fp32 `[B, S_kv, D]`; fp32 `[H]`.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        slattn.BackendRefusal: no CUDA device, no TileLang, or a size the kernels do not take.
    """
    describe_v4(q, kv, attn_sink, topk_idxs, sm_scale, deterministic=None)
    (batch, queries, heads, dim), keys = q.shape, kv.shape[1]
    delta = preprocess(batch, queries, heads, dim)(o, do)
    dkv = torch.zeros_like(kv, dtype=torch.float32, memory_format=torch.contiguous_format)
    d_attn_sink = torch.zeros(heads, dtype=torch.float32, device=q.device)
    main = bwd(
        *(batch, queries, keys, heads, dim, topk_idxs.shape[-1], sm_scale),
        indices_dtype="int64" if topk_idxs.dtype == torch.int64 else "int32",
    )
    dq = main(q, kv, do, attn_sink, topk_idxs, lse, delta, dkv, d_attn_sink)
    return dq, dkv if return_dkv_accum_dtype else postprocess(batch, keys, dim)(dkv), d_attn_sink


def _sink_gradient(attn_sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum over the queries of p_sink * delta, from an lse in base 2 with the sink; 0 for a sink at an infinity."""
    sink = attn_sink.float()
    share = torch.exp2((sink * LOG2E - lse).clamp(max=0.0))
    nothing = (lse == torch.inf) | sink.isinf()  # an empty row, or a sink that leaves nothing to the keys
    return -(share * delta).masked_fill(nothing, 0.0).sum((0, 1))


def _dtypes(dtype: str, accum_dtype: str) -> None:
    if dtype != "bfloat16" or accum_dtype != "float32":
        raise ValueError(f"the kernels take bfloat16 and accumulate in float32; got {dtype} and {accum_dtype}")


def _shaped(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as the others are; got {tensor.device}")
