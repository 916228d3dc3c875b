"""Before the collectives of a call: what every rank must say alike is compared, and all raise or none does."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from slattn.backends import MODULES
from slattn.distributed.collectives import Groups, exchange
from slattn.problem import FLOAT_DTYPES

CALLS = ("sparse_attention", "gather_keys")
LAYOUTS = ("contiguous", "zigzag")
BACKENDS = ("auto", *MODULES)
MESSAGE_BYTES = 256  # of a rank's own error, for the others to repeat


class Header(NamedTuple):
    """What one rank tells the others of its call, in 64-bit integers."""

    rank: int
    failed: int = False  # its own arguments do not fit, and a message follows
    call: int = 0
    gathered: int = False  # the keys came from gather_keys
    tokens: int = 0
    keys: int = 0
    head_dim: int = 0
    value_dim: int = 0
    dtype: int = 0
    scale: int = 0  # the bits of the float
    backend: int = 0
    layout: int = 0
    keep_gathered: int = 0
    kv_gradient: int = 0
    any_gradient: int = 0


def float_bits(value: float) -> int:
    """The bits of a float as an integer."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


# What every rank must say alike: what it is called, and how its value is shown.
AGREED: dict[str, tuple[str, Callable[[int], object]]] = {
    "call": ("the function that is called", lambda value: CALLS[value]),
    "gathered": ("whether the keys come from gather_keys", bool),
    "head_dim": ("D of q and kv", int),
    "value_dim": ("d_v", int),
    "dtype": ("q's dtype", lambda value: FLOAT_DTYPES[value]),
    "scale": ("scale", lambda value: struct.unpack("d", struct.pack("q", value))[0]),
    "backend": ("backend", lambda value: BACKENDS[value]),
    "layout": ("layout", lambda value: LAYOUTS[value]),
    "keep_gathered": ("keep_gathered", bool),
    "kv_gradient": ("whether kv requires a gradient", bool),
    "any_gradient": ("whether any of q, kv and attn_sink requires a gradient", bool),
}


def agree(header: Header, failure: Exception | None, groups: Groups) -> tuple[int, ...]:
    """N_r of each rank of `group`, once every rank of the mesh is known to want the same; raises on all or on none."""
    message = str(failure or "").encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    table = torch.tensor([[*header, *struct.unpack(f"{MESSAGE_BYTES // 8}q", message)]], device="cpu")
    for group in groups:  # along the rows, then those rows along the columns: each rank hears of the whole mesh
        table = table if group is None else exchange(table, group)
    if failure is not None:
        raise failure
    records = table.tolist()
    headers = [Header(*record[: len(header)]) for record in records]
    for other, record in zip(headers, records, strict=True):
        if other.failed:
            text = struct.pack(f"{MESSAGE_BYTES // 8}q", *record[len(header) :]).rstrip(b"\0").decode(errors="ignore")
            raise ValueError(f"the arguments of rank {other.rank} do not fit: {text}")
    for field, (what, shown) in AGREED.items():
        _same(what, {other.rank: shown(getattr(other, field)) for other in headers}, "on every rank")
    group, tp_group = groups
    ranks, place = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sharing = [other.rank for other in headers[place::ranks]]
    if tp_group is not None and sharing != dist.get_process_group_ranks(tp_group):
        raise ValueError(
            "group and tp_group must be the two dimensions of one mesh; got "
            f"{dist.get_process_group_ranks(group)} and {dist.get_process_group_ranks(tp_group)}"
        )
    for first in range(ranks):  # ranks with the same place in `group`: they share queries and keys
        sharers = headers[first::ranks]
        _same("N of kv", {other.rank: other.keys for other in sharers}, "over tp_group")
        _same("T of q", {other.rank: other.tokens for other in sharers}, "over tp_group")
    lengths = tuple(other.keys for other in headers[:ranks])
    if LAYOUTS[header.layout] == "zigzag" and (len(set(lengths)) > 1 or lengths[0] % 2):
        raise ValueError(f"kv must have the same even number of keys on each rank for layout 'zigzag'; got {lengths}")
    return lengths


def _same(what: str, values: dict[int, object], where: str) -> None:
    """Raise unless the ranks' values are equal."""
    first: dict[object, int] = {}
    for rank, value in values.items():
        first.setdefault(value, rank)
    if len(first) > 1:
        got = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{what} must be the same {where}; got {got}")
