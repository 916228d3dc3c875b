"""The operation in plain torch, on any device, in any float dtype: the oracle, and the default on a CPU.

It computes what docs/contract.md says, literally, a few queries at a time so that the gathered keys stay small.
bf16 and fp16 are computed in fp32 and rounded once. The backward is written out rather than left to autograd,
because with the queries and the output gradients stacked, its five products become three large ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slattn.problem import Problem, counting, lse_dtype

# Gathered keys and scores of one chunk of queries. Measured on 2 CPU cores at H=64, D=512, K=640:
# see docs/performance.md, "The reference".
CHUNK_BYTES = 32 * 2**20


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would run the products in bf16; inside here all arithmetic is fp32 or fp64."""

    @functools.wraps(function)
    def run(problem: Problem, *arguments: Any, **keywords: Any) -> Any:
        kind = problem.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if autocast else contextlib.nullcontext():
            return function(problem, *arguments, **keywords)

    return run


def refusal(problem: Problem) -> str | None:
    """The reference takes every problem."""
    return None


@_without_autocast
def forward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, d_v] in q's dtype and lse [B, S, H], natural logarithm, keys only, +inf for an empty row."""
    keys, rows = _padded_keys(problem, kv), _key_rows(problem, indices, topk_length)
    sink = None if attn_sink is None else attn_sink.to(keys.dtype)
    out = q.new_empty(problem.tokens, problem.heads, problem.value_dim)
    lse = q.new_empty(problem.tokens, problem.heads, dtype=keys.dtype)
    flat_q = q.reshape(problem.tokens, problem.heads, problem.head_dim)
    for part in _chunks(problem, keys):
        index, counts = rows[part], rows[part] % (problem.keys + 1) != problem.keys
        chosen = keys[index]  # [t, K, D]
        s = torch.bmm(flat_q[part].to(keys.dtype) * problem.scale, chosen.mT)  # [t, H, K]
        s.masked_fill_(~counts.unsqueeze(1), -torch.inf)
        empty = ~counts.any(-1)[:, None, None]
        top = s.amax(-1, keepdim=True).masked_fill_(empty, 0.0)
        e = s.sub_(top).exp_()
        total = e.sum(-1, keepdim=True)
        lse_keys = (top + total.log()).masked_fill_(empty, torch.inf)
        # Weights not by the log-sum-exp, whose rounding at large logits is no small part of them; and before the
        # product, which large values would overflow.
        p = e.mul_(_inverse(total, top, sink).masked_fill_(empty, 0.0))
        out[part] = torch.bmm(p, chosen[..., : problem.value_dim]).to(q.dtype)
        lse[part] = lse_keys.squeeze(-1)
    lead = (problem.batch, problem.queries, problem.heads)
    return out.view(*lead, problem.value_dim), lse.view(lead)


def _inverse(total: Tensor, top: Tensor, sink: Tensor | None) -> Tensor:
    """1 / (total + exp(sink - top)), [t, H, 1], where no exponential overflows."""
    if sink is None:
        return total.reciprocal()
    above = sink[:, None] - top
    below = above.clamp(min=0).neg_().exp_()
    return below / (total * below + above.clamp_(max=0).exp_())


@_without_autocast
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
    """(dq, dkv, dsink) for those of q, kv and attn_sink that `needs` names, None for the others."""
    keys, rows = _padded_keys(problem, kv), _key_rows(problem, indices, topk_length)
    heads, head_dim, value_dim = problem.heads, problem.head_dim, problem.value_dim
    need_q, need_kv, need_sink = needs
    dq = torch.empty_like(q).view(problem.tokens, heads, head_dim) if need_q else None
    dkeys = torch.zeros_like(keys) if need_kv else None
    dsink = keys.new_zeros(heads) if need_sink else None
    flat = [x.reshape(problem.tokens, heads, x.shape[-1]) for x in (q, out, grad_out)]
    lse = lse.reshape(problem.tokens, heads, 1)
    sink = None if attn_sink is None else attn_sink.to(keys.dtype)[:, None]
    for part in _chunks(problem, keys):
        index, counts = rows[part], rows[part] % (problem.keys + 1) != problem.keys
        qs, o, do = (x[part].to(keys.dtype) for x in flat)
        empty = ~counts.any(-1)[:, None, None]
        do = do.masked_fill(empty if sink is None else empty | (sink == torch.inf), 0.0)  # nothing comes from out
        delta = (o * do).sum(-1, keepdim=True)
        lse_keys = lse[part].masked_fill(empty, torch.inf)
        lse_all = lse_keys if sink is None else torch.logaddexp(lse_keys, sink)
        if dsink is not None and sink is not None:
            share = (sink - lse_all).exp() * delta
            dsink -= share.masked_fill_(empty | sink.isinf(), 0.0).sum((0, 2))
        if dq is None and dkeys is None:
            continue
        stacked = keys.new_zeros(2, qs.shape[0], heads, head_dim)  # output gradients over scaled queries
        stacked[0, ..., :value_dim] = do
        torch.mul(qs, problem.scale, out=stacked[1])
        chosen = keys[index]
        products = keys.new_empty(qs.shape[0], 2 * heads, chosen.shape[1])
        torch.bmm(stacked.transpose(0, 1).reshape(-1, 2 * heads, head_dim), chosen.mT, out=products)
        dp, s = products[:, :heads], products[:, heads:]
        s.masked_fill_(~counts.unsqueeze(1), -torch.inf)
        from_lse = None
        if grad_lse is not None:
            dlse = grad_lse.reshape(problem.tokens, heads, 1)[part].masked_fill(empty, 0.0)
            from_lse = (s - lse_keys).exp_().mul_(dlse)
        p = s.sub_(lse_all).exp_()
        ds = dp.sub_(delta).mul_(p).masked_fill_(~counts.unsqueeze(1), 0.0)
        if from_lse is not None:
            ds += from_lse
        if dq is not None:
            dq[part] = torch.bmm(ds, chosen).mul_(problem.scale).to(q.dtype)
        if dkeys is not None:
            sources = stacked.flip(0).transpose(0, 1).reshape(-1, 2 * heads, head_dim)
            _scatter(dkeys, index, torch.bmm(products.mT, sources, out=chosen), problem.deterministic)
    return (
        None if dq is None else dq.view(q.shape),
        None if dkeys is None else _unpadded(problem, dkeys).to(dkv_dtype),
        dsink,
    )


@_without_autocast
def slot_probs(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """[B, S, K] in lse's dtype: each slot's probability, summed over the heads; 0 where a slot does not count."""
    keys, rows = _padded_keys(problem, kv), _key_rows(problem, indices, topk_length)
    lse_all = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(lse.dtype))
    flat_q = q.reshape(problem.tokens, problem.heads, problem.head_dim)
    flat_lse = lse_all.reshape(problem.tokens, problem.heads, 1)
    probs = torch.empty_like(rows, dtype=lse.dtype)
    for part in _chunks(problem, keys):
        s = torch.bmm(flat_q[part].to(keys.dtype) * problem.scale, keys[rows[part]].mT)  # [t, H, K]
        counts = rows[part] % (problem.keys + 1) != problem.keys
        probs[part] = s.sub_(flat_lse[part]).exp_().sum(1).masked_fill_(~counts, 0.0)
    return probs.view(problem.batch, problem.queries, problem.slots)


def _padded_keys(problem: Problem, kv: Tensor) -> Tensor:
    """kv in the inner dtype, with a row of zeros after each batch entry, flat: the row that empty slots read."""
    dtype = lse_dtype(problem.dtype)
    padded = kv.new_zeros(problem.batch, problem.keys + 1, problem.head_dim, dtype=dtype)
    padded[:, : problem.keys] = kv
    return padded.view(-1, problem.head_dim)


def _unpadded(problem: Problem, keys: Tensor) -> Tensor:
    return keys.view(problem.batch, problem.keys + 1, problem.head_dim)[:, : problem.keys].contiguous()


def _key_rows(problem: Problem, indices: Tensor, topk_length: Tensor | None) -> Tensor:
    """[T, K] int64: the row of the padded keys that each slot names; the row of zeros where it does not count."""
    counts = counting(indices, problem.keys, topk_length)
    first = torch.arange(problem.batch, device=indices.device).view(-1, 1, 1) * (problem.keys + 1)
    return (torch.where(counts, indices.long(), problem.keys) + first).view(problem.tokens, problem.slots)


def _chunks(problem: Problem, keys: Tensor) -> Iterator[slice]:
    per_query = problem.slots * (2 * problem.head_dim + 4 * problem.heads) * keys.element_size()
    step = max(1, CHUNK_BYTES // per_query)
    for start in range(0, problem.tokens, step):
        yield slice(start, min(start + step, problem.tokens))


def _scatter(dkeys: Tensor, index: Tensor, rows: Tensor, deterministic: bool) -> None:
    """Add rows [t, K, D] to dkeys at index [t, K]."""
    index, rows = index.reshape(-1), rows.view(-1, rows.shape[-1])
    if deterministic and dkeys.is_cuda:
        dkeys.index_put_((index,), rows, accumulate=True)  # sorts; index_add_ would use atomics
    else:
        dkeys.index_add_(0, index, rows)
