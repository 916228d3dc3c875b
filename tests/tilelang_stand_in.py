"""A stand-in for the TileLang kernels' host side, on any device: the truth, and hard to please.

It has the four functions of `slattn.backends.tilelang` that the V4 drop-ins call, computes what they compute, in
float32, and asserts that it is called as they demand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slattn import reference
from slattn.backends import tilelang
from slattn.problem import Problem

LOG2E = 1.4426950408889634


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Put a stand-in in place of the functions, and give it."""
    stand_in = Kernels()
    for name in ("refusal", "forward", "delta_of", "main_backward"):
        monkeypatch.setattr(tilelang, name, getattr(stand_in, name))
    return stand_in


@dataclass(eq=False)
class Kernels:
    """`calls` records every call: the function's name, then its arguments."""

    reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def refusal(self, problem: Problem) -> str | None:
        assert not problem.deterministic
        assert problem.value_dim == problem.head_dim
        return self.reason

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        attn_sink: Tensor,
        topk_length: None,
        *,
        reference_rounding: bool,
        block: int | None,
        threads: int | None,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(
            {"name": "forward", "reference_rounding": reference_rounding, "block": block, "threads": threads}
        )
        assert topk_length is None
        self._check(problem, q, kv, indices)
        assert attn_sink.shape == (problem.heads,)
        assert attn_sink.is_contiguous()
        return reference.forward(problem, q, kv, indices, attn_sink, None)

    def delta_of(self, out: Tensor, grad_out: Tensor) -> Tensor:
        self.calls.append({"name": "delta_of"})
        for tensor in (out, grad_out):
            assert tensor.dtype == torch.bfloat16
            assert tensor.is_contiguous()
        return (out.float() * grad_out.float()).sum(-1)

    def main_backward(
        self,
        problem: Problem,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        topk_length: None,
        grad_out: Tensor,
        lse2: Tensor,
        delta: Tensor,
        *,
        dkv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """dq, and dkv, to which it adds. A row whose lse2 is +inf adds nothing, whatever else it holds."""
        self.calls.append({"name": "main_backward"})
        assert topk_length is None
        self._check(problem, q, kv, indices)
        lead = (problem.batch, problem.queries, problem.heads)
        assert grad_out.shape == q.shape
        assert lse2.shape == delta.shape == lead
        assert dkv.shape == kv.shape
        assert dkv.dtype == lse2.dtype == delta.dtype == torch.float32
        assert dkv.data_ptr() % 16 == 0
        for tensor in (grad_out, lse2, delta, dkv):
            assert tensor.is_contiguous()
        keys, rows = reference._padded_keys(problem, kv), reference._key_rows(problem, indices, None)
        counts = (rows % (problem.keys + 1) != problem.keys)[:, None]
        flat = (problem.tokens, problem.heads, problem.head_dim)
        lse2, delta = lse2.view(*flat[:2], 1), delta.view(*flat[:2], 1)
        live = lse2 != torch.inf
        queries, do = q.view(flat).float(), grad_out.view(flat).float().masked_fill(~live, 0.0)
        chosen = keys[rows]
        s = queries @ chosen.mT * problem.scale
        p = torch.exp2((s * LOG2E - lse2).clamp(max=0.0)).masked_fill(~(counts & live), 0.0)
        ds = (p * (do @ chosen.mT - delta.masked_fill(~live, 0.0))) * problem.scale
        sums = torch.zeros_like(keys).index_add_(0, rows.flatten(), (ds.mT @ queries + p.mT @ do).flatten(0, 1))
        dkv += reference._unpadded(problem, sums)
        return (ds @ chosen).to(q.dtype).view(q.shape), dkv

    def _check(self, problem: Problem, q: Tensor, kv: Tensor, indices: Tensor) -> None:
        assert q.shape == (problem.batch, problem.queries, problem.heads, problem.head_dim)
        assert kv.shape == (problem.batch, problem.keys, problem.head_dim)
        assert indices.shape == (problem.batch, problem.queries, problem.slots)
        assert q.dtype == kv.dtype == problem.dtype
        assert indices.dtype in (torch.int32, torch.int64)
        for tensor in (q, kv, indices):
            assert tensor.is_contiguous()
            assert not (tensor.requires_grad and torch.is_grad_enabled())
