"""The shared list of special cases, and the kinds of indices, lengths and sinks that they name.

One list for the tests, for `slattn check` and for whoever adds a backend. Every case is small: the float64 reference
runs each in well under a second on two CPU cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One special case, in words.

    Purpose by group: the names `H..-D..-T..-N..-K..` are sizes that no tile divides; `keys-..` few or no keys;
    `indices-..` what may stand in a row; `length-..` what may stand in topk_length; `sink-..` each kind of sink;
    `values-..` and `grad-..` data that overflows, cancels or must never be read; `batch-..` the batched layout.
    """

    name: str
    heads: int = 16
    head_dim: int = 512
    value_dim: int | None = None  # None: the default of the operation
    queries: int = 5  # per batch entry
    keys: int = 150  # per batch entry
    slots: int = 128
    batch: int | None = None  # None: the flat layout
    indices: str = "distinct"  # a name of INDEX_PATTERNS
    int64: bool = False  # indices as int64, and fillers that no int32 holds
    lengths: str | None = None  # None: no topk_length; a name of LENGTHS
    sink: str | None = "random"  # None: no sink; a name of SINKS
    values: str = "normal"  # "normal", "large" (logits of 100), "negative" (of -120), "unseen" (NaN where unread)
    scale: float | None = None
    grad_scale: float = 1.0  # of grad_out
    grad_empty: bool = False  # NaN and Inf arrive for the rows in which no slot counts
    grad_lse: bool = False
    budgets: Mapping[str, float] = field(default_factory=dict, hash=False)  # replace CASE_BUDGETS, each with its reason


# What can stand in a slot and name no key, besides -1; N stands for the number of keys.
_FILLERS = (-(2**31), -123456, -1, 114514, 1919810, 2147480000, 2**31 - 1)
_FILLERS_INT64 = (2**32, 2**32 + 3, -(2**32) + 1, 2**62, -(2**63))  # cut to 32 bits, the first three name a key
_MIXED_SINKS = (-math.inf, math.inf, 0.0, 2.4e38, -3e38, 30.0, -30.0, 0.5)


def _distinct(rows: int, case: Case, generator: torch.Generator) -> Tensor:
    """[rows, K] int64, distinct keys in random order; where K > N also -1, at random places."""
    keys = torch.rand(rows, max(case.keys, case.slots), generator=generator).argsort(-1)[:, : case.slots]
    return keys.masked_fill_(keys >= case.keys, -1)


def _filled(rows: int, case: Case, generator: torch.Generator, share: float, fillers: tuple[int, ...]) -> Tensor:
    """Distinct keys, of which about `share` are replaced by a random one of `fillers`."""
    chosen = torch.tensor(fillers)[torch.randint(len(fillers), (rows, case.slots), generator=generator)]
    holes = torch.rand(rows, case.slots, generator=generator) < share
    return torch.where(holes, chosen, _distinct(rows, case, generator))


def _fillers(rows: int, case: Case, generator: torch.Generator) -> Tensor:
    extra = _FILLERS_INT64 if case.int64 else ()
    return _filled(rows, case, generator, 0.5, (*_FILLERS, case.keys, case.keys + 1, *extra))


def _keep(rows: int, case: Case, generator: torch.Generator, keep: Tensor) -> Tensor:
    """Distinct keys where `keep`, broadcast to [rows, K], is true; -1 elsewhere."""
    return _distinct(rows, case, generator).masked_fill_(~keep, -1)


def _few(rows: int, case: Case, generator: torch.Generator, keys: int) -> Tensor:
    return torch.randint(min(keys, case.keys), (rows, case.slots), generator=generator)


def _causal(rows: int, case: Case, generator: torch.Generator) -> Tensor:
    """Row t names keys 0 to t, then -1: row 0 sees one key."""
    slot = torch.arange(case.slots)
    seen = torch.minimum(torch.arange(rows) % max(case.queries, 1), torch.tensor(case.keys - 1))
    return torch.where(slot <= seen[:, None], slot, -1)


def _empty_rows(rows: int, case: Case, generator: torch.Generator) -> Tensor:
    row = torch.arange(rows)
    return _keep(rows, case, generator, ~((row == 0) | (row == rows // 2) | (row == rows - 1))[:, None])


def _edges(rows: int, case: Case, generator: torch.Generator) -> Tensor:
    """The last key in even batch entries, the first in odd ones, beside values just outside on either side."""
    even = (torch.arange(rows) // case.queries % 2 == 0)[:, None]
    slot = torch.arange(case.slots)
    edge = torch.where(even, case.keys - 1, 0)
    return torch.where(slot % 3 == 0, edge, torch.where(slot % 3 == 1, -1, case.keys))


# Name -> (rows, case, generator) -> [rows, K] int64.
INDEX_PATTERNS: dict[str, Callable[[int, Case, torch.Generator], Tensor]] = {
    "distinct": _distinct,
    "ascending": lambda rows, case, g: _distinct(rows, case, g).sort(-1).values,
    "duplicates": lambda rows, case, g: _few(rows, case, g, 7),
    "one key": lambda rows, case, g: _few(1, case, g, 1).expand(rows, -1),
    "holes": lambda rows, case, g: _filled(rows, case, g, 0.3, (-1,)),
    "fillers": _fillers,
    "first 64 empty": lambda rows, case, g: _keep(rows, case, g, torch.arange(case.slots) >= 64),
    "first 65 empty": lambda rows, case, g: _keep(rows, case, g, torch.arange(case.slots) >= 65),
    "last slot only": lambda rows, case, g: _keep(rows, case, g, torch.arange(case.slots) == case.slots - 1),
    "empty blocks": lambda rows, case, g: _keep(
        rows, case, g, (torch.arange(case.slots) // 64 + torch.arange(rows)[:, None]) % 3 == 1
    ),
    "tail empty": lambda rows, case, g: _keep(rows, case, g, torch.arange(case.slots) < case.slots * 3 // 4),
    "causal": _causal,
    "empty rows": _empty_rows,
    "empty": lambda rows, case, g: torch.full((rows, case.slots), -1),
    "edges": _edges,
}

# Name -> (rows, K, generator) -> [rows].
LENGTHS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "mixed": lambda rows, k, g: torch.tensor([0, 1, 63, 64, 65, k - 1, k, k + 1, k + 9999, -1, -(2**31), 2**31 - 1])[
        torch.arange(rows) % 12
    ],
    "random": lambda rows, k, g: torch.randint(k + 1, (rows,), generator=g),
    "zero": lambda rows, k, g: torch.zeros(rows),
}


def _constant_sink(value: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda heads, g: torch.full((heads,), value)


# Name -> (H, generator) -> [H] float32.
SINKS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": lambda heads, g: torch.randn(heads, generator=g) + 2.0,
    "bf16": lambda heads, g: torch.randn(heads, generator=g) + 2.0,
    "mixed": lambda heads, g: torch.tensor(_MIXED_SINKS)[torch.arange(heads) % len(_MIXED_SINKS)],
    **{name: _constant_sink(float(name)) for name in ("-inf", "+inf", "2.4e38", "30", "-30")},
}

# (heads, head_dim, queries, keys, slots): every head count that a tensor-parallel shard may have, every number of
# slots next to a tile's edge, numbers of keys and queries that divide nothing.
_SIZES = (
    (1, 512, 62, 131, 64),
    (2, 576, 62, 300, 65),
    (4, 512, 213, 95, 33),
    (8, 128, 16, 20, 16),
    (8, 512, 62, 592, 128),
    (8, 576, 3, 4163, 2063),
    (12, 576, 3, 257, 127),
    (16, 512, 1, 640, 640),
    (16, 576, 62, 153, 65),
    (20, 512, 3, 200, 63),
    (24, 512, 3, 1300, 129),
    (32, 576, 3, 2500, 1152),
    (40, 512, 3, 700, 160),
    (48, 576, 3, 500, 31),
    (64, 64, 5, 200, 160),
    (64, 128, 5, 200, 129),
    (64, 256, 5, 200, 64),
    (64, 512, 3, 1592, 640),
    (64, 576, 2, 4096, 2048),
    (80, 512, 3, 100, 1),
    (96, 512, 3, 300, 128),
    (128, 512, 2, 2304, 1152),
    (128, 576, 1, 4097, 2048),
    (192, 512, 3, 200, 65),
    (256, 512, 1, 300, 64),
)


# Budgets that replace slattn.testing.CASE_BUDGETS where the data itself amplifies rounding: about 1.5 times the worst
# that a model of a kernel with one rounding of P and one of dS (tests/kernel_model.py) shows over eight seeds.
# One key holds nearly all the weight: dp - delta nearly cancels, and delta comes from the bf16 output.
_ONE_KEY = {"dq": 2.5e-2, "dkv": 4e-3}
# Few keys hold the weight, so that few roundings make up the error, and dp - delta cancels in part.
_FEW_KEYS = {"dq": 4.5e-3, "dkv": 3.5e-3}
_FEW_HEADS = {"dsink": 3e-2}  # a sum of random sign over the queries, compared for one or two heads alone
# Logits of a hundred: a tensor core truncates as it adds them up, and an H200 then gives lse to 5.2e-7 to 6.5e-7, in
# FlashMLA as in our kernels.
_LARGE_LOGITS = {"lse": 1e-6}
_PEAKED = {"dq": 1.5e-2, "dkv": 1.5e-2, "dsink": 3e-2}  # logits far apart: as _ONE_KEY, for part of the rows
# A large part is common to all keys; dq is the small difference that is left of it, out and dkv carry it whole.
_COMMON_PART = {"dq": 5e-2, "dkv": 1.5e-2} | _LARGE_LOGITS


def _size(heads: int, head_dim: int, queries: int, keys: int, slots: int) -> Case:
    budgets = _FEW_KEYS if slots == 1 else _FEW_HEADS if heads <= 2 else {}
    name = f"H{heads}-D{head_dim}-T{queries}-N{keys}-K{slots}"
    return Case(name, heads, head_dim, queries=queries, keys=keys, slots=slots, budgets=budgets)


CASES: tuple[Case, ...] = (
    *(_size(*size) for size in _SIZES),
    # Few keys, no queries, no keys.
    Case("queries-0", queries=0),
    Case("keys-0", keys=0, slots=64, grad_empty=True, grad_lse=True),
    Case("keys-1", keys=1, slots=64, indices="duplicates", budgets=_ONE_KEY),
    Case("keys-31", keys=31, slots=65),
    Case("keys-95-slots-2048", keys=95, slots=2048, queries=2),
    # What may stand in a row of indices.
    Case("indices-ascending", indices="ascending"),
    Case("indices-duplicates", indices="duplicates", sink=None, budgets=_FEW_KEYS),
    Case("indices-one-key", indices="one key", queries=62, slots=64, budgets=_ONE_KEY),
    Case("indices-holes", indices="holes", head_dim=576),
    Case("indices-first-64-empty", indices="first 64 empty", slots=129, sink=None),
    Case("indices-first-65-empty", indices="first 65 empty", slots=160),
    Case("indices-last-slot-only", indices="last slot only", slots=129, budgets=_FEW_KEYS),
    Case("indices-empty-blocks", indices="empty blocks", slots=640, keys=700),
    Case("indices-tail-empty", indices="tail empty", heads=64, head_dim=576, sink=None),
    Case("indices-causal", indices="causal", queries=62, keys=62, slots=64),
    Case(
        "indices-causal-no-sink-576",
        indices="causal",
        queries=62,
        keys=62,
        slots=64,
        head_dim=576,
        sink=None,
        budgets=_FEW_KEYS,
    ),
    Case("indices-fillers", indices="fillers", heads=64),
    Case("indices-int64", indices="fillers", int64=True, head_dim=576),
    Case("indices-empty-rows", indices="empty rows", grad_empty=True, grad_lse=True),
    Case("indices-empty-rows-no-sink-576", indices="empty rows", head_dim=576, heads=64, sink=None, grad_empty=True),
    Case("indices-empty-rows-sink-mixed", indices="empty rows", heads=64, sink="mixed", grad_empty=True),
    Case("indices-all-empty", indices="empty", grad_empty=True),
    Case("indices-all-empty-no-sink", indices="empty", sink=None, grad_lse=True),
    # topk_length.
    Case("length-mixed", lengths="mixed", queries=12, grad_empty=True, budgets=_FEW_KEYS),
    Case("length-mixed-576", lengths="mixed", queries=12, heads=64, head_dim=576, slots=160, sink=None),
    Case("length-mixed-72-heads", lengths="mixed", queries=12, heads=72, budgets=_FEW_KEYS),
    Case("length-fillers", lengths="random", indices="fillers", queries=12),
    Case("length-zero", lengths="zero", grad_empty=True),
    # Sinks, alone so that no head's error hides behind another's, and together.
    Case("sink-none", sink=None, heads=64),
    Case("sink-bf16", sink="bf16", heads=64),
    Case("sink-minus-inf", sink="-inf"),
    Case("sink-plus-inf", sink="+inf", grad_lse=True),
    Case("sink-huge", sink="2.4e38"),
    Case("sink-high", sink="30"),
    Case("sink-high-64-heads", sink="30", heads=64),
    Case("sink-high-576", sink="30", heads=64, head_dim=576, grad_lse=True),
    Case("sink-low", sink="-30"),
    Case("sink-mixed", sink="mixed", heads=64),
    Case("sink-mixed-576", sink="mixed", heads=24, head_dim=576, grad_lse=True),
    # Data that overflows, cancels, or must never be read.
    Case("values-unseen", values="unseen", indices="holes"),
    Case(
        "values-unseen-576",
        values="unseen",
        indices="fillers",
        lengths="random",
        head_dim=576,
        heads=8,
        sink=None,
        budgets=_FEW_KEYS,
    ),
    Case("values-large", values="large", heads=64, queries=12, budgets=_PEAKED | _LARGE_LOGITS),
    Case(
        "values-large-576",
        values="large",
        heads=64,
        head_dim=576,
        queries=12,
        sink=None,
        budgets=_PEAKED | _LARGE_LOGITS,
    ),
    Case("values-negative", values="negative", heads=64, sink=None, budgets=_COMMON_PART),
    Case("values-negative-one-query", values="negative", heads=64, queries=1, sink=None, budgets=_COMMON_PART),
    Case(
        "values-negative-576", values="negative", heads=16, head_dim=576, sink=None, grad_lse=True, budgets=_COMMON_PART
    ),
    Case("scale-half", scale=0.5, budgets=_PEAKED),
    Case("scale-negative", scale=-0.02),
    Case("grad-tiny", grad_scale=1e-9),
    Case("grad-huge", grad_scale=1e4),
    Case("grad-lse", grad_lse=True, heads=64),
    Case("grad-lse-576", grad_lse=True, head_dim=576, heads=8, sink=None),
    # The batched layout: indices are local to their entry, the neighbours' rows are near.
    Case("batch-1", batch=1, indices="holes"),
    Case("batch-2-edges", batch=2, indices="edges", queries=3, keys=65, slots=65, budgets=_ONE_KEY),
    Case("batch-3-lengths", batch=3, indices="fillers", lengths="mixed", queries=4, head_dim=576, grad_empty=True),
    Case("batch-3-one-key-each", batch=3, keys=1, indices="causal", queries=3, slots=33, budgets=_ONE_KEY),
    Case("batch-2-no-keys", batch=2, keys=0, queries=3, slots=33),
)
