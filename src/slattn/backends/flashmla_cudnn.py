"""The vendor pair: FlashMLA's sparse prefill forward with the sparse-attention backward of cuDNN's frontend.

    forward  -> compact_rows -> attend        -> flash_mla_sparse_fwd               once for each group of heads
    backward -> compact_rows -> differentiate -> sparse_attention_backward_wrapper  once for each group of heads

Every convention of the two libraries stops here. Both take one flat sequence, so a batch becomes global key numbers.
Rows are compacted into a valid prefix with its length, because older cuDNN releases read holes as keys. FlashMLA
takes 64 or 128 heads, so heads run in padded groups. FlashMLA's logarithm has base e or 2: it is asked which.
cuDNN must not see an empty row (older releases hang on one), so an empty row is handed over as a row of one harmless
key and its gradient is cleared. Nothing waits for the GPU after the first call, so that CUDA graphs can be captured.

cuDNN returns dkv in bf16 only: a float32 dkv from here carries that one rounding for each group of heads. Its SM90
kernels sum dkv with float32 atomics: no deterministic mode.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slattn.backends import BackendRefusal, vendor_runtimes
from slattn.backends.vendor_runtimes import VALUE_DIM, ask, on_device, takes_indexer_topk
from slattn.problem import MAX_KEYS, Problem, counting

HEAD_DIMS = (512, 576)
MAX_GROUP = 128  # FlashMLA takes exactly 64 or 128 heads
# FlashMLA's SM90 and SM100 kernels take K in multiples of 128; its nv_dev branch (the one whose function has an
# indexer_topk) has variants that want 512.
SLOT_ALIGNMENT, SLOT_ALIGNMENT_NV_DEV = 128, 512
# exp(s - 1e30) is 0 for every logit, as it is at +inf; above 2.36e38 the product with log2(e) would overflow.
LARGEST_SINK = 1e30
SM90_KEY_BLOCK = 64  # keys that cuDNN's SM90 backward rounds up to
TRUST = "SLATTN_TRUST"  # names of backends, in the environment, that run without their self-test
NOT_DETERMINISTIC = "cuDNN's SM90 backward sums dkv with float32 atomics, so its gradients differ from run to run"


def refusal(problem: Problem) -> str | None:
    """Why the pair cannot run `problem` here, in a sentence, with the command that mends it; None if it can.

    The first question about a GPU compiles cuDNN's kernels and runs a small self-test (see `vendor_runtimes`).
    """
    if problem.device.type != "cuda":
        return f"FlashMLA and cuDNN run on NVIDIA GPUs; the tensors are on {problem.device}"
    major, minor = torch.cuda.get_device_capability(problem.device)
    if major < 9:
        return f"FlashMLA and cuDNN need compute capability 9.0 or newer; this GPU has {major}.{minor}"
    if problem.dtype != torch.bfloat16:
        return f"FlashMLA and cuDNN take bfloat16; got {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS or problem.value_dim != VALUE_DIM:
        return (
            f"FlashMLA and cuDNN take D = 512 or 576 with d_v = 512; "
            f"got D = {problem.head_dim}, d_v = {problem.value_dim}"
        )
    if problem.scale <= 0:  # the running maximum is taken before the scale
        return f"FlashMLA takes a positive scale; got {problem.scale}"
    if problem.deterministic:
        return NOT_DETERMINISTIC
    if problem.batch * problem.keys >= MAX_KEYS:
        return f"its key numbers are int32 over the whole batch; got {problem.batch} x {problem.keys} keys"
    if major == 9 and problem.batch * problem.keys > most_keys(problem.head_dim):
        return (
            f"cuDNN's SM90 backward counts the elements of dkv in int32 and, at D = {problem.head_dim}, takes up to "
            f"{most_keys(problem.head_dim)} keys over the whole batch; got {problem.batch} x {problem.keys}"
        )
    for runtime in (vendor_runtimes.flash_mla(), vendor_runtimes.cudnn_dsa()):
        if runtime.found is None:
            return runtime.missing
    if "flashmla_cudnn" in os.environ.get(TRUST, "").split(","):
        return None
    failure = vendor_runtimes.self_test_failure(problem, forward, backward)
    return failure and f"{failure}; {TRUST}=flashmla_cudnn in the environment runs it all the same"


def most_keys(head_dim: int) -> int:
    """The keys whose float32 dkv, in whole blocks, has fewer than 2^31 elements; from SM100 on cuDNN has 64 bits."""
    return (2**31 - 1) // head_dim // SM90_KEY_BLOCK * SM90_KEY_BLOCK


def forward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    *,
    sparse_fwd: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, 512] bf16 and lse [B, S, H] float32: natural logarithm, keys only, +inf for an empty row.

    Args:
        sparse_fwd: the `flash_mla_sparse_fwd` to call; default the one installed.
    """
    lead = (problem.batch, problem.queries, problem.heads)
    if problem.tokens == 0 or problem.keys == 0:
        return q.new_zeros(*lead, VALUE_DIM), q.new_full(lead, math.inf, dtype=torch.float32)
    if sparse_fwd is None:
        sparse_fwd = vendor_runtimes.flash_mla().found
    alignment = SLOT_ALIGNMENT_NV_DEV if takes_indexer_topk(sparse_fwd) else SLOT_ALIGNMENT
    rows, lengths = compact_rows(indices, topk_length, problem.keys, alignment)
    out, lse = attend(
        sparse_fwd,
        q.view(problem.tokens, problem.heads, problem.head_dim),
        kv.view(-1, problem.head_dim),
        rows,
        lengths,
        _sink(problem, attn_sink),
        problem.scale,
    )
    return out.view(*lead, VALUE_DIM), lse.view(lead)


def backward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    needs: tuple[bool, bool, bool],
    dkv_dtype: torch.dtype,
    sparse_bwd: Callable[..., Any] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq bf16, dkv in `dkv_dtype`, dsink float32) for those of q, kv and attn_sink that `needs` names, else None.

    cuDNN computes all three at once, so that leaving one out saves nothing but its tensor. A gradient of lse takes a
    second pass (see `_lse_only`).

    Args:
        sparse_bwd: the `sparse_attention_backward_wrapper` to call; default the one installed.
    """
    need_q, need_kv, need_sink = needs
    if problem.tokens == 0 or problem.keys == 0 or not any(needs):
        return (
            torch.zeros_like(q) if need_q else None,
            torch.zeros_like(kv, dtype=dkv_dtype) if need_kv else None,
            q.new_zeros(problem.heads, dtype=torch.float32) if need_sink else None,
        )
    if sparse_bwd is None:
        sparse_bwd = vendor_runtimes.cudnn_dsa().found.sparse_attention_backward_wrapper
    rows, lengths = compact_rows(indices, topk_length, problem.keys, SLOT_ALIGNMENT)
    flat_q, flat_out, flat_do = (x.view(problem.tokens, problem.heads, -1) for x in (q, out, grad_out))
    flat_lse = lse.view(problem.tokens, problem.heads)
    sink = _sink(problem, attn_sink)
    run = functools.partial(differentiate, sparse_bwd, flat_q, kv.view(-1, problem.head_dim), rows, lengths)
    dq, dkv, dsink = run(sink, flat_out, flat_lse, flat_do, problem.scale)
    if grad_lse is not None and (need_q or need_kv):
        no_sink = torch.full_like(sink, -math.inf)
        pseudo_out, pseudo_do = _lse_only(grad_lse.view(problem.tokens, problem.heads))
        dq_lse, dkv_lse, _ = run(no_sink, pseudo_out, flat_lse, pseudo_do, problem.scale)
        dq, dkv = (dq.float() + dq_lse.float()).to(q.dtype), dkv.float() + dkv_lse.float()
    if dsink is not None and attn_sink is not None:
        dsink = dsink.masked_fill(attn_sink.isinf(), 0.0)
    return (
        dq.view(q.shape) if need_q else None,
        dkv.to(dkv_dtype).view(kv.shape) if need_kv else None,
        dsink if need_sink else None,
    )


def compact_rows(indices: Tensor, topk_length: Tensor | None, keys: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Each query's keys as both libraries take them: a valid prefix, in the order given, and its length.

    Args:
        indices: [B, S, K], local to the batch entry; topk_length: int32 [B, S] or None; keys: N.
        alignment: the width is padded to a multiple of this.

    Returns:
        int32 [B * S, padded K], global key numbers (local + b * N), -1 after the prefix; int32 [B * S] lengths.
    """
    batch, queries, slots = indices.shape
    slot = torch.arange(slots, device=indices.device)
    valid = counting(indices, keys, topk_length)
    rank = valid.cumsum(-1, dtype=torch.int32)  # of a valid slot, counted from 1
    lengths = rank[..., -1:]
    place = torch.where(valid, rank - 1, lengths + slot - rank)  # a permutation: holes go behind the prefix
    named = indices
    if batch > 1:
        named = indices + torch.arange(batch, device=indices.device).view(-1, 1, 1) * keys
    values = torch.where(valid, named, -1).to(torch.int32)
    width = math.ceil(slots / alignment) * alignment
    rows = indices.new_full((batch, queries, width), -1, dtype=torch.int32).scatter_(-1, place, values)
    return rows.view(-1, width), lengths.reshape(-1).contiguous()


def attend(
    sparse_fwd: Callable[..., Any],
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    lengths: Tensor,
    sink: Tensor,
    scale: float,
    *,
    may_be_empty: bool = True,
) -> tuple[Tensor, Tensor]:
    """FlashMLA's forward on compact rows: out [T, H, 512] bf16 and lse [T, H], natural, keys only, +inf when empty.

    Args:
        q: bf16 [T, H, D]; kv: bf16 [N, D]; rows: int32 [T, K] and lengths: int32 [T] as from `compact_rows`.
        sink: float32 [H], -inf for none.
        may_be_empty: False where the caller knows that every row has a key; saves clearing the empty ones.
    """
    dialect = ask(sparse_fwd, q.device)
    extra = {"indexer_topk": 0} if takes_indexer_topk(sparse_fwd) else {}
    outs, lses = [], []
    for heads, padded in head_groups(q.shape[1]):
        with on_device(q.device):
            result = sparse_fwd(
                _padded(q, heads, padded),
                kv.unsqueeze(1),
                rows.unsqueeze(1),
                scale,
                d_v=VALUE_DIM,
                attn_sink=_padded_sink(sink, heads, padded),
                topk_length=lengths,
                **extra,
            )
        count = heads.stop - heads.start
        outs.append(result[0][:, :count])
        lses.append(result[2][:, :count])
    out = outs[0].contiguous() if len(outs) == 1 else torch.cat(outs, 1)
    lse = lses[0].contiguous() if len(lses) == 1 else torch.cat(lses, 1)
    lse = lse * dialect.nats if dialect.nats != 1.0 else lse
    empty = lengths == 0
    if may_be_empty and not dialect.clears_empty_rows:
        out.masked_fill_(empty[:, None, None], 0)
    return out, lse.masked_fill(empty[:, None], math.inf)


def differentiate(
    sparse_bwd: Callable[..., Any],
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    lengths: Tensor,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scale: float,
    *,
    may_be_empty: bool = True,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """cuDNN's backward on compact rows: dq bf16 [T, H, D], dkv [N, D], dsink float32 [H] (None where it gives none).

    Args:
        q, kv, rows, lengths, sink, scale, may_be_empty: as in `attend`.
        out, grad_out: bf16 [T, H, 512]; lse: float32 [T, H], as `attend` gave it.
        deterministic: bit-equal gradients in every run; cuDNN has them from SM100 on.

    Raises:
        BackendRefusal: deterministic on SM90.

    Returns:
        dkv is cuDNN's bf16, or, where the heads ran in several groups, their float32 sum.
    """
    extra = _deterministic(q.device) if deterministic else {}
    lse = lse.masked_fill((lengths == 0)[:, None], math.inf)  # so that exp(s - lse) is 0
    empty = lengths == 0 if may_be_empty else None
    rows, lengths = without_empty_rows(rows, lengths)
    groups = head_groups(q.shape[1])
    dqs, dsinks, dkv = [], [], None
    for heads, padded in groups:
        with on_device(q.device):
            result = sparse_bwd(
                _padded(q, heads, padded, empty),  # an empty row's query may hold NaN
                kv,
                _padded(out, heads, padded),
                _padded(grad_out, heads, padded, empty),
                _padded(lse, heads, padded),
                _padded_sink(sink, heads, padded),
                rows,
                softmax_scale=scale,
                topk_length=lengths,
                **extra,
            )
        count = heads.stop - heads.start
        dqs.append(result["dq"][:, :count])
        if "d_sink" in result:
            dsinks.append(result["d_sink"][:count])
        dkv = result["dkv"] if len(groups) == 1 else result["dkv"].float() + (0.0 if dkv is None else dkv)
    dq = dqs[0].contiguous() if len(dqs) == 1 else torch.cat(dqs, 1)
    assert dkv is not None  # there is at least one group
    if empty is not None:
        # The one key of an empty row may hold NaN; where every row is empty, nobody named it.
        dq = dq.masked_fill_(empty[:, None, None], 0)
        dkv = torch.where(empty.all(), 0.0, dkv).to(dkv.dtype)
    return dq, dkv, torch.cat(dsinks) if len(dsinks) == len(groups) else None


def without_empty_rows(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Compact rows in which every row has a key and every slot, counting or not, names a key in range.

    A slot behind the prefix repeats its row's first key; an empty row gets length 1 and, everywhere, a key that some
    other row names. So whatever a kernel reads for a slot that does not count, it reads no key that nobody named.
    """
    own = rows[:, :1]
    own = torch.where(own < 0, own.amax().clamp_min(0), own)
    return torch.where(rows < 0, own, rows), lengths.clamp_min(1)


def head_groups(heads: int) -> list[tuple[slice, int]]:
    """How FlashMLA takes a head count: slices of at most 128 heads, and the 64 or 128 each is padded to."""
    starts = range(0, heads, MAX_GROUP)
    groups = [slice(start, min(start + MAX_GROUP, heads)) for start in starts]
    return [(group, 64 if group.stop - group.start <= 64 else 128) for group in groups]


def _deterministic(device: torch.device) -> dict[str, bool]:
    """cuDNN's argument for gradients that are equal in every run; a BackendRefusal where it has none."""
    if device.type != "cuda":
        return {}
    if torch.cuda.get_device_capability(device)[0] < 10:
        raise BackendRefusal(
            f"{NOT_DETERMINISTIC}; slattn.sparse_attention(..., backend='tilelang') has a deterministic backward"
        )
    return {"deterministic": True}


def _lse_only(grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """A pseudo (out, grad_out), bf16 [T, H, 512], whose backward is that of lse alone.

    cuDNN forms ds = p (dp - delta), with delta = <out, grad_out> in float32. Without a sink p is exp(s - lse), so
    delta = -dlse gives the wanted ds = p dlse if dp vanishes beside it. dlse is split into three bf16 parts (24 bits),
    scaled by 2^-40 as grad_out, against out = -2^40 in their columns: dp, and the part p grad_out of dkv, are then
    2^-40 of dlse times a key's size, while bf16 rounds at 2^-9.
    """
    shape = (*grad_lse.shape, VALUE_DIM)
    out = torch.zeros(shape, dtype=torch.bfloat16, device=grad_lse.device)
    grad_out = torch.zeros_like(out)
    rest = grad_lse
    for column in range(3):
        part = rest.to(torch.bfloat16)
        rest = rest - part.float()
        out[..., column] = -(2.0**40)
        grad_out[..., column] = part * 2.0**-40
    return out, grad_out


def _sink(problem: Problem, attn_sink: Tensor | None) -> Tensor:
    """[H] float32, -inf without a sink; never so large that its product with log2(e) overflows."""
    if attn_sink is None:
        return torch.full((problem.heads,), -math.inf, device=problem.device, dtype=torch.float32)
    return attn_sink.float().clamp_max(LARGEST_SINK)


def _padded(x: Tensor, heads: slice, padded: int, empty: Tensor | None = None) -> Tensor:
    """x [T, H, ...] for one group of heads, contiguous, with zeros for the padding and for the rows in `empty`."""
    part = x[:, heads]
    count = part.shape[1]
    if empty is None and count == padded:
        return part.contiguous()
    whole = part.new_empty(part.shape[0], padded, *part.shape[2:])
    whole[:, count:] = 0
    if empty is None:
        whole[:, :count] = part
    else:
        torch.where(empty.view(-1, *(1 for _ in part.shape[1:])), part.new_zeros(()), part, out=whole[:, :count])
    return whole


def _padded_sink(sink: Tensor, heads: slice, padded: int) -> Tensor:
    """The sinks of one group of heads; -inf, none, for the padding."""
    return torch.nn.functional.pad(sink[heads], (0, padded - (heads.stop - heads.start)), value=-math.inf)
