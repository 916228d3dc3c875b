"""What the functions of FlashMLA and cuDNN return and slattn's own do not: the largest logits, results by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slattn.problem import counting

GATHERED_BYTES = 256 * 2**20  # of the keys and logits of one chunk of queries


class Result(dict[str, Tensor]):
    """By name, by position, or unpacked in order, as cuDNN's results are."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Tensor:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


@torch.no_grad()
def max_logits(q: Tensor, kv: Tensor, indices: Tensor, scale: float, topk_length: Tensor | None) -> Tensor:
    """Float32 `[T, H]`: max over the slots that count of `scale * <q, kv>`, natural units; -inf in an empty row.

    Args:
        q: `[T, H, D]`.
        kv: `[N, D]`.
        indices: integer `[T, K]`.
        topk_length: integer `[T]` or None.
    """
    slots = indices.shape[-1]
    counts = counting(indices, kv.shape[0], topk_length)
    largest = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if kv.shape[0] == 0:
        return largest
    rows = indices.masked_fill(~counts, 0).long()
    step = max(1, GATHERED_BYTES // (slots * (q.shape[-1] * q.element_size() + 4 * q.shape[1])))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        s = torch.bmm(q[part].float() * scale, kv[rows[part]].float().mT)  # [t, H, K]
        largest[part] = s.masked_fill_(~counts[part].unsqueeze(1), -torch.inf).amax(-1)
    return largest
