"""What a backward sums dkv in: fp32, or in deterministic mode integers of each row's unit, exact in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slattn.backends.views import flat, rows
from slattn.kernels.build import kernel
from slattn.kernels.config import (
    BackwardConfig,
    FinishConfig,
    HopperBackwardConfig,
    TallyConfig,
    UnitsConfig,
    WeighConfig,
)
from slattn.problem import Problem


@dataclass(frozen=True)
class Sums:
    """The table of a call, for each row of kv, and in deterministic mode what `slattn.kernels.exact_cuda` needs."""

    table: Tensor  # [B * N, D] fp32, or [B * N, D / 2] int64
    expected: Tensor  # [T]: what each query expects of a part
    scales: Tensor  # [B * N]: 1 / the unit
    parts: Tensor  # [B * N]: how many are added
    whole: Tensor  # [B * N, D] int64: the numbers beyond what was expected, in units


def plain_sums(table: Tensor) -> Sums:
    """Those of a table of fp32, with stand-ins for what is not read."""
    none = table.new_empty(1, table.shape[-1], dtype=torch.int64)
    number = none.view(torch.float32).view(-1)[:1]
    return Sums(table, number, number, none.view(torch.int32).view(-1)[:1], none)


def exact_sums(
    problem: Problem,
    config: BackwardConfig | HopperBackwardConfig,
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    grad_out: Tensor,
    norm: Tensor | None,
    lse: Tensor,
    lse2: Tensor,
    grad_lse: Tensor | None,
) -> Sums:
    """Those of a call, with nothing in them yet. norm: the sum of |grad_out|; lse, lse2 and grad_lse are [T, H]."""
    lse_part = lse if grad_lse is None else size_of_lse_part(q, grad_lse, problem.scale)  # or a stand-in
    if norm is None:
        norm = grad_out.abs().sum(-1, dtype=torch.float32)
    keys = problem.batch * problem.keys
    size, parts = indices.new_zeros(2, keys).unbind()
    expected, weight = lse.new_empty(problem.tokens), indices.new_zeros(keys, dtype=torch.int64)
    slots = indices.view(-1, problem.slots), flat(topk_length, indices)
    counts = problem.queries, problem.keys, int(topk_length is not None)
    groups = (problem.heads + config.head_tile - 1) // config.head_tile
    shares = torch.cuda.get_device_properties(lse.device).multi_processor_count
    kernel(TallyConfig(config.arch))(
        *(*slots, norm.view(-1, problem.heads), lse, lse2, lse_part, expected, size, parts),
        *(*counts, int(grad_lse is not None), problem.value_dim, groups, shares),
    )
    kernel(WeighConfig(config.arch))(*slots, expected, size, weight, *counts, groups, shares)
    scales = lse.new_empty(keys)
    kernel(UnitsConfig(config.arch))(size, weight, parts, scales)
    table = indices.new_zeros(keys, problem.head_dim // 2, dtype=torch.int64)
    return Sums(table, expected, scales, parts, indices.new_zeros(keys, problem.head_dim, dtype=torch.int64))


def size_of_lse_part(q: Tensor, grad_lse: Tensor, scale: float) -> Tensor:
    """[T, H]: what grad_lse [T, H] adds to dkv for a slot that has all of the weight, its root mean square over the
    columns, with grad_lse's sign; of q [.., H, D] the mean of |q| is taken, and that it is normal.
    """
    size = torch.linalg.vector_norm(q, 1, dim=-1, dtype=torch.float32).view_as(grad_lse)
    size *= scale * 1.2533141 / q.shape[-1]  # before grad_lse, so that no product overflows that the next makes small
    return grad_lse * size


def finish(config: BackwardConfig | HopperBackwardConfig, sums: Sums, dkv: Tensor, add: bool) -> None:
    """Write dkv, bf16 or fp32, or add to it."""
    pieces = dkv.shape[-1] // 32
    kernel(FinishConfig(str(dkv.dtype).removeprefix("torch."), config.deterministic, config.arch))(
        sums.table.view(len(sums.table) * pieces, -1),
        rows(dkv, 1).view(-1, 32),
        int(add),
        sums.whole.view(-1, 32),
        sums.scales,
        sums.parts,
        pieces,
    )
