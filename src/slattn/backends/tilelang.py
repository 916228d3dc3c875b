"""The host side of our TileLang kernels: pick a configuration, allocate, launch.

The kernels themselves are in slattn.kernels; what they are compiled for is in slattn.kernels.config.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from slattn.backends.exact import exact_sums, finish, plain_sums
from slattn.backends.views import flat, joined, pieces, rows
from slattn.kernels import build
from slattn.kernels.build import kernel
from slattn.kernels.config import (
    VALUE_DIMS,
    CompactConfig,
    HopperBackwardConfig,
    HopperForwardConfig,
    PrepareConfig,
    architecture,
    backward_config,
    forward_config,
    slot_probs_config,
)
from slattn.problem import Problem, int32_indices

Pair = tuple[Tensor, Tensor]
# From so many slots that count on, Hopper's backward makes a query's delta itself, a part with each block of the query
# before. Shorter queries mostly follow short ones, whose few blocks that would delay: a kernel beforehand makes theirs.
DELTA_WITHIN = 512
NEVER = 2**31 - 1
ANY_LAYOUT = True  # see slattn.backends
_HERE = contextlib.nullcontext()


def refusal(problem: Problem) -> str | None:
    """Why the kernels cannot run this problem, in a sentence; None if they can."""
    if problem.device.type != "cuda":
        return f"the kernels need an NVIDIA GPU, and the tensors are on {problem.device}"
    if problem.dtype != torch.bfloat16:
        return f"the kernels take bfloat16, and q is {problem.dtype}"
    if VALUE_DIMS.get(problem.head_dim) != problem.value_dim:
        pairs = ", ".join(f"({d}, {v})" for d, v in VALUE_DIMS.items())
        return f"the kernels take (D, d_v) of {pairs}, not ({problem.head_dim}, {problem.value_dim})"
    if problem.batch * problem.keys >= 2**31:
        return f"the kernels count keys in int32, and {problem.batch} batch entries of {problem.keys} are too many"
    if problem.slots > 2**31 - 256:
        return f"the kernels count slots in int32, and {problem.slots} a row are too many"
    return _machine_refusal(problem.device.index or 0)


@functools.cache
def _machine_refusal(device: int) -> str | None:
    reason = build.missing()
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if architecture(capability) is None:
        return (
            f"the kernels are written for compute capability 8.0, 9.0 and 10.0, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return None


def kernels(problem: Problem) -> dict[str, str]:
    """The configurations of the forward and of the backward with all gradients but that of lse."""
    shape = _arch(problem.device), problem.heads, problem.head_dim
    backward = backward_config(*shape, deterministic=problem.deterministic)
    return {"forward": str(forward_config(*shape)), "backward": str(backward)}


def forward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    *,
    reference_rounding: bool = False,
    block: int | None = None,
    threads: int | None = None,
) -> Pair:
    """out [.., H, d_v] bf16 and lse [.., H] fp32, natural logarithm, keys only, +inf for an empty row; .. as q has it.

    `reference_rounding`, `block` and `threads` are the V4 drop-in's; see docs/contract.md for the first.
    """
    out = q.new_empty(*q.shape[:-1], problem.value_dim)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if problem.tokens == 0 or problem.keys == 0:
        return out.zero_(), lse.fill_(torch.inf)
    config = forward_config(
        _arch(q.device),
        problem.heads,
        problem.head_dim,
        reference_rounding=reference_rounding,
        block=block,
        threads=threads,
    )
    sink = None if attn_sink is None else attn_sink.float()
    indices = int32_indices(indices, problem.keys)
    rest = (_multiprocessors(q.device),) if isinstance(config, HopperForwardConfig) else ()
    with _on(q.device):
        kernel(config)(
            rows(q),
            rows(kv, 1),
            joined(indices),
            flat(topk_length, indices),
            flat(sink, lse),
            rows(out),
            joined(lse),
            problem.queries,
            problem.keys,
            int(topk_length is not None),
            int(sink is not None),
            problem.scale,
            *rest,
        )
    return out, lse


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dkv in `dkv_dtype`, dsink in fp32), None where `needs` says so."""
    norm = torch.empty_like(lse) if problem.deterministic and needs[1] else None
    shape = _arch(q.device), problem.heads, problem.head_dim
    config = backward_config(*shape, dq=needs[0], dkv=needs[1], deterministic=problem.deterministic)
    listed = None
    if isinstance(config, HopperBackwardConfig) and problem.tokens > 0 and problem.keys > 0:
        indices = int32_indices(indices, problem.keys)
        listed = compact(problem, indices, topk_length)
    within = NEVER if listed is None or config.deterministic else DELTA_WITHIN
    delta, lse2, weight = prepare(problem, out, lse, grad_out, attn_sink, norm, listed, within)
    dq, dkv = main_backward(
        *(problem, q, kv, indices, topk_length, grad_out, lse2, delta, lse, grad_lse),
        needs=needs[:2],
        dkv_dtype=dkv_dtype,
        norm=norm,
        listed=listed,
        out=None if within == NEVER else out,
    )
    return dq, dkv, (weight * delta).sum((0, 1)).neg() if needs[2] and weight is not None else None


def prepare(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    attn_sink: Tensor | None,
    norm: Tensor | None = None,
    listed: Pair | None = None,
    within: int = NEVER,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(delta, lse in base 2 with the sink, what of the weights the sink has), all [B, S, H] fp32; the last where there
    is a sink. Minus its product with delta, summed over the queries, is the sink's gradient.

    Writes the sum of |grad_out| over the columns into `norm` [B, S, H] where it is given. Where `listed`, of `compact`,
    has `within` slots or more, delta need not be written.
    """
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    sink = None if attn_sink is None else attn_sink.float()
    weight = None if sink is None else torch.empty_like(lse)
    sinks = sink, lse2, lse2 if weight is None else weight
    _prepare(out, grad_out, delta, lse, sinks, norm, problem.heads, listed, within)
    return delta, lse2, weight


def delta_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """<out, grad_out> over the last axis, a multiple of 64, in fp32; out and grad_out bf16, contiguous."""
    delta = out.new_empty(out.shape[:-1], dtype=torch.float32)
    _prepare(out, grad_out, delta)
    return delta


def _prepare(
    out: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor | None = None,
    sinks: tuple[Tensor | None, Tensor, Tensor] | None = None,
    norm: Tensor | None = None,
    heads: int = 1,
    listed: Pair | None = None,
    within: int = NEVER,
) -> None:
    """Launch it: with lse what `sinks` has after the sink is written too; norm where it is given."""
    if not delta.numel():
        return
    sink, lse2, weight = sinks or (None, delta, delta)
    with _on(delta.device):
        kernel(PrepareConfig(_arch(delta.device)))(
            pieces(out),
            pieces(grad_out),
            (delta if lse is None else lse).view(-1),
            flat(sink, delta),
            *(x.view(-1) for x in (delta, lse2, weight)),
            heads,
            int(lse is not None),
            int(sink is not None),
            flat(norm, delta),
            int(norm is not None),
            flat(None if listed is None else listed[1], delta).view(torch.int32),
            within,
        )


def compact(problem: Problem, indices: Tensor, topk_length: Tensor | None) -> Pair:
    """The rows of kv that each query's slots name, without holes, and how many: what Hopper's backward reads."""
    listed = indices.new_empty(problem.tokens, max((problem.slots + 63) // 64, 1) * 64)
    counts = indices.new_empty(problem.tokens)
    with _on(indices.device):
        kernel(CompactConfig())(
            indices.view(-1, problem.slots),
            flat(topk_length, indices),
            listed,
            counts,
            problem.queries,
            problem.keys,
            int(topk_length is not None),
        )
    return listed, counts


def main_backward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    grad_out: Tensor,
    lse2: Tensor,
    delta: Tensor,
    lse: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    needs: tuple[bool, bool] = (True, True),
    dkv: Tensor | None = None,
    dkv_dtype: torch.dtype = torch.float32,
    norm: Tensor | None = None,
    listed: Pair | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dq [B, S, H, D] bf16, dkv [B, N, D] in `dkv_dtype`), from delta and an lse in base 2 with the sink.

    Adds into `dkv`, fp32, where it is given. lse is natural and over the keys alone; without it the portable kernel
    runs, or in deterministic mode it is made anew. `norm`: of grad_out, as `prepare` gives it. `listed`: of `compact`,
    where Hopper's kernel runs; of queries with DELTA_WITHIN slots or more it makes and writes delta if `out` is given.
    """
    need_q, need_kv = needs
    deterministic = problem.deterministic and need_kv
    if deterministic and lse is None:
        lse = forward(problem, q, kv, indices, None, topk_length)[1]
    if not (need_q or need_kv):
        return None, None
    dq = torch.empty_like(q) if need_q else None
    if problem.tokens == 0 or problem.keys == 0:
        if need_kv and dkv is None:
            dkv = kv.new_zeros(kv.shape, dtype=dkv_dtype)
        return None if dq is None else dq.zero_(), dkv
    config = backward_config(
        *(_arch(q.device), problem.heads, problem.head_dim),
        grad_lse=grad_lse is not None,
        dq=need_q,
        dkv=need_kv,
        deterministic=deterministic,
        lse=lse is not None,
    )
    hopper = isinstance(config, HopperBackwardConfig)
    assert hopper or out is None, "nobody would make delta"
    indices = int32_indices(indices, problem.keys)
    statistics = lse2.view(-1, problem.heads), delta.view(-1, problem.heads)
    lses = [(lse2 if x is None else x).view(-1, problem.heads) for x in (lse, grad_lse)]
    with _on(q.device):
        if deterministic:
            sums = exact_sums(
                *(problem, config, q, indices, topk_length, grad_out, norm, lses[0], statistics[0]),
                None if grad_lse is None else lses[1],
            )
        else:
            sums = plain_sums(_table(problem, kv, None if hopper else dkv, need_kv))
        if hopper and dq is not None:
            listed = compact(problem, indices, topk_length) if listed is None else listed
            kernel(config)(
                *(rows(q), rows(kv, 1), rows(grad_out), *listed),
                *statistics,
                *(rows(dq), sums.table, sums.expected, sums.scales, sums.whole),
                *lses,
                int(grad_lse is not None),
                rows(grad_out if out is None else out),
                NEVER if out is None else DELTA_WITHIN,
                problem.scale,
                _multiprocessors(dq.device),
            )
        else:
            kernel(config)(
                *(rows(q), rows(kv, 1), rows(grad_out)),
                *(indices.view(-1, problem.slots), flat(topk_length, indices)),
                *statistics,
                *(rows(q if dq is None else dq), sums.table),
                *(problem.queries, problem.keys, int(topk_length is not None), problem.scale),
                *lses,
                *(sums.expected, sums.scales, sums.whole),
            )
        if not need_kv:
            return dq, None
        if hopper or deterministic:
            into = kv.new_empty(kv.shape, dtype=dkv_dtype) if dkv is None else dkv
            finish(config, sums, into, dkv is not None)
            return dq, into
        return dq, sums.table.view(kv.shape).to(dkv_dtype) if dkv is None else dkv


def _table(problem: Problem, kv: Tensor, dkv: Tensor | None, need_kv: bool) -> Tensor:
    """What dkv is summed in, fp32: dkv itself where it is given, zeros, or a stand-in that is not written."""
    if not need_kv:
        return kv.new_empty(1, problem.head_dim, dtype=torch.float32)
    if dkv is not None:
        return rows(dkv, 1)
    return kv.new_zeros(problem.batch * problem.keys, problem.head_dim, dtype=torch.float32)


def slot_probs(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """[B, S, K] fp32: each slot's probability, summed over the heads; 0 where a slot does not count."""
    probs = lse.new_empty(indices.shape)
    if problem.tokens == 0 or problem.keys == 0:
        return probs.zero_()
    lse_all = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.float())
    indices = int32_indices(indices, problem.keys)
    with _on(q.device):
        kernel(slot_probs_config(_arch(q.device), problem.heads, problem.head_dim))(
            rows(q),
            rows(kv, 1),
            indices.view(-1, problem.slots),
            flat(topk_length, indices),
            lse_all.view(-1, problem.heads),
            probs.view(-1, problem.slots),
            problem.queries,
            problem.keys,
            int(topk_length is not None),
            problem.scale,
        )
    return probs


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """In which the device is the current one: mostly it is already, and torch's context would take 2 us."""
    return _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


@functools.cache
def _arch(device: torch.device) -> int:
    arch = architecture(torch.cuda.get_device_capability(device))
    assert arch is not None, "refusal() comes first"
    return arch


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
