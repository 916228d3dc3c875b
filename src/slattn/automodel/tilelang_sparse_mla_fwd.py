"""Drop-in for NeMo AutoModel's `deepseek_v4.kernels.tilelang_sparse_mla_fwd`: the forward of DeepSeek-V4's sparse MQA.

Same names, parameters, order, defaults and meaning; the LSE is base 2 with the sink included, +inf for an empty row.
Where the original wants contiguous tensors, a power of two for D, or 64 heads and multiples, this takes what
`slattn.sparse_attention` takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slattn.backends import BackendRefusal, tilelang
from slattn.problem import LOG2E, Problem, describe

_BLOCK, _STAGES, _THREADS = 64, 2, 256  # the defaults: at these the library runs its best kernel
_NAMES = {"indices": "topk_idxs", "scale": "sm_scale"}  # slattn.problem's names -> V4's


def sparse_mqa_fwd(
    heads: int,
    dim: int,
    topk: int,
    sm_scale: float | None = None,
    block_I: int = _BLOCK,
    num_stages: int = _STAGES,
    threads: int = _THREADS,
    reference_rounding: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel for any batch, sequence and key count.

    Args:
        heads, dim, topk: H, D and K of the calls to come.
        sm_scale: of the logits; default `dim ** -0.5`.
        block_I, num_stages, threads: slots a step, key buffers and threads of a block. At their defaults the library
            chooses; set, they are honoured or refused.
        reference_rounding: the arithmetic of DeepSeek-V4's released inference kernel (docs/contract.md, "Accuracy").

    Returns:
        kernel(q, kv, attn_sink, topk_idxs) or kernel(q, kv, attn_sink, topk_idxs, valid_mask), which gives (out, lse)
        as `sparse_mqa_fwd_interface` does; with a mask, int or bool, a slot counts where it is nonzero and the index
        is in range.

    Raises:
        ValueError: a block_I, num_stages or threads that no kernel has; the kernel, for other H, D or K, or for a
            block_I that does not fit the machine's shared memory.
    """
    if num_stages != _STAGES:
        raise ValueError(f"num_stages must be {_STAGES}: the kernel has two key buffers in turn; got {num_stages}")
    for name, value, taken in (("block_I", block_I, (32, 64, 128)), ("threads", threads, (128, 256))):
        if value not in taken:
            raise ValueError(f"{name} must be one of {taken}; got {value}")

    @torch.no_grad()
    def kernel(
        q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, valid_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        problem = describe_v4(q, kv, attn_sink, topk_idxs, sm_scale)
        if (problem.heads, problem.head_dim, problem.slots) != (heads, dim, topk):
            raise ValueError(
                f"this kernel was made for {heads} heads, D = {dim} and {topk} slots; got q {list(q.shape)} and "
                f"topk_idxs {list(topk_idxs.shape)}"
            )
        out, lse = tilelang.forward(
            problem,
            q.contiguous(),
            kv.contiguous(),
            masked_indices(topk_idxs, valid_mask),
            attn_sink.contiguous(),
            None,
            reference_rounding=reference_rounding,
            block=None if block_I == _BLOCK else block_I,
            threads=None if threads == _THREADS else threads,
        )
        return out, torch.logaddexp(lse, attn_sink.float()) * LOG2E

    return kernel


def sparse_mqa_fwd_interface(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
    block_I: int = _BLOCK,
    num_stages: int = _STAGES,
    threads: int = _THREADS,
    reference_rounding: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward of DeepSeek-V4's sparse MQA.

    Args:
        q: bf16 CUDA queries `[batch, sequence, heads, head_dim]`.
        kv: bf16 CUDA keys, which are the values too, `[batch, kv_sequence, head_dim]`.
        attn_sink: fp32 CUDA logits `[heads]` that join the denominators.
        topk_idxs: integer CUDA indices `[batch, sequence, slots]`; entries outside `[0, kv_sequence)` do not count.
        sm_scale: of the logits; default `head_dim ** -0.5`.
        block_I, num_stages, threads, reference_rounding: as for `sparse_mqa_fwd`.

    Returns:
        (out, lse): a new bf16 `[batch, sequence, heads, head_dim]`, and fp32 `[batch, sequence, heads]`, base 2, with
        the sink; +inf for an empty row.

    Raises:
        TypeError, ValueError: arguments that do not fit, as `slattn.sparse_attention`.
        slattn.BackendRefusal: no CUDA device, no TileLang, or a size the kernels do not take.
    """
    problem = describe_v4(q, kv, attn_sink, topk_idxs, sm_scale)
    sizes = problem.heads, problem.head_dim, problem.slots
    kernel = sparse_mqa_fwd(*sizes, sm_scale, block_I, num_stages, threads, reference_rounding)
    return kernel(q, kv, attn_sink, topk_idxs)


def describe_v4(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None,
    *,
    deterministic: bool | None = False,
) -> Problem:
    """The problem that V4's arguments are, checked; the kernels must be willing to run it.

    The forward is deterministic as it is; the backward asks with None, for what torch's switch says.
    """
    if isinstance(q, Tensor) and q.dim() != 4:
        raise ValueError(f"q must be [batch, sequence, heads, head_dim]; got {list(q.shape)}")
    if not isinstance(attn_sink, Tensor):
        raise TypeError(f"attn_sink must be a torch.Tensor; got {type(attn_sink).__name__}")
    head_dim = q.shape[-1] if isinstance(q, Tensor) else None
    try:
        problem = describe(
            q, kv, topk_idxs, scale=sm_scale, attn_sink=attn_sink, d_v=head_dim, deterministic=deterministic
        )
    except (TypeError, ValueError) as error:
        name, _, words = str(error).partition(" ")
        raise type(error)(f"{_NAMES.get(name, name)} {words}") from None
    if kv.dtype != q.dtype:
        raise TypeError(f"kv must be {q.dtype}, as q is; got {kv.dtype}")
    refuse(problem)
    return problem


def refuse(problem: Problem) -> None:
    """Raise what the kernels have against a problem, if anything."""
    reason = tilelang.refusal(problem)
    if reason is not None:
        raise BackendRefusal(f"the TileLang kernels cannot run this call: {reason}")


def masked_indices(topk_idxs: Tensor, valid_mask: Tensor | None) -> Tensor:
    """The indices, contiguous, with -1 where the mask, if there is one, is zero."""
    if valid_mask is None:
        return topk_idxs.contiguous()
    if not isinstance(valid_mask, Tensor):
        raise TypeError(f"valid_mask must be a torch.Tensor; got {type(valid_mask).__name__}")
    if valid_mask.shape != topk_idxs.shape or valid_mask.device != topk_idxs.device:
        raise ValueError(
            f"valid_mask must have topk_idxs's shape and device, {list(topk_idxs.shape)} on {topk_idxs.device}; "
            f"got {list(valid_mask.shape)} on {valid_mask.device}"
        )
    return topk_idxs.masked_fill(valid_mask == 0, -1).contiguous()
