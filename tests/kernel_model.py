"""A backend that rounds where a bf16 kernel rounds: P and dS once each to bf16, everything else in float32.

It answers two questions on a machine without a GPU: whether the budgets of `slattn.testing` can be met at all (a
budget below this model's error would be wrong), and whether they are tight (a second rounding must not pass).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slattn.problem import Problem
from slattn.reference import _key_rows, _padded_keys, _unpadded

EXTRA_ROUNDINGS = False  # set by the test that shows that the budgets notice a second rounding


def refusal(problem: Problem) -> str | None:
    return None


def _rounded(x: Tensor) -> Tensor:
    if EXTRA_ROUNDINGS:
        x = (x * 1.3).bfloat16().float() / 1.3
    return x.bfloat16().float()


def _scores(problem: Problem, q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None) -> tuple[Tensor, ...]:
    keys, rows = _padded_keys(problem, kv), _key_rows(problem, indices, topk_length)
    counts = (rows % (problem.keys + 1) != problem.keys)[:, None]
    flat_q = q.reshape(problem.tokens, problem.heads, problem.head_dim).float()
    chosen = keys[rows]
    s = (flat_q @ chosen.mT * problem.scale).masked_fill(~counts, -torch.inf)
    return flat_q, keys, rows, chosen, s, ~counts.any(-1, keepdim=True)


def forward(
    problem: Problem, q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, topk_length: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, _, _, chosen, s, empty = _scores(problem, q, kv, indices, topk_length)
    top = s.amax(-1, keepdim=True).masked_fill(empty, 0.0)
    e = (s - top).exp()
    lse = (top + e.sum(-1, keepdim=True).log()).masked_fill(empty, torch.inf)
    lse_all = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.float()[:, None])
    out = _rounded(e) @ chosen[..., : problem.value_dim] * (top - lse_all).exp()
    lead = (problem.batch, problem.queries, problem.heads)
    return out.to(q.dtype).view(*lead, problem.value_dim), lse.view(lead)


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
    flat_q, keys, rows, chosen, s, empty = _scores(problem, q, kv, indices, topk_length)
    shape = (problem.tokens, problem.heads, problem.value_dim)
    do = grad_out.reshape(shape).float().masked_fill(empty, 0.0)
    delta = (do * out.reshape(shape).float()).sum(-1, keepdim=True)
    lse = lse.reshape(*shape[:2], 1)
    sink = None if attn_sink is None else attn_sink.float()[:, None]
    lse_all = lse if sink is None else torch.logaddexp(lse, sink)
    p = (s - lse_all).exp()
    ds = p * (do @ chosen[..., : problem.value_dim].mT - delta)
    if grad_lse is not None:
        ds = ds + (s - lse).exp() * grad_lse.reshape(*shape[:2], 1).masked_fill(empty, 0.0)
    ds = _rounded(ds)
    dq = (ds @ chosen * problem.scale).to(q.dtype).view(q.shape)
    rows_of_dkv = ds.mT @ flat_q * problem.scale
    rows_of_dkv[..., : problem.value_dim] += _rounded(p).mT @ do
    dkeys = torch.zeros_like(keys).index_add_(0, rows.flatten(), rows_of_dkv.flatten(0, 1))
    dsink = None
    if sink is not None:
        share = (sink - lse_all).exp().masked_fill(empty | sink.isinf(), 0.0)
        dsink = -(share * delta).sum((0, 2))
    return dq, _unpadded(problem, dkeys).to(dkv_dtype), dsink
