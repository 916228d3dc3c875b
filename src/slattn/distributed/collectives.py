"""What one rank asks of the others: all keys, its rows of a sum over ranks, and small messages between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Groups(NamedTuple):
    """The process groups of a call: queries and keys split over one, heads over the other; None: not split."""

    group: ProcessGroup | None
    tp_group: ProcessGroup | None

    @property
    def names(self) -> list[str]:
        """What an operator takes in place of the groups; "" for None."""
        return ["" if group is None else group.group_name for group in self]

    @staticmethod
    def of(names: list[str]) -> Groups:
        """The groups of these names."""
        from torch.distributed import distributed_c10d

        _resolve_process_group: Any = distributed_c10d._resolve_process_group
        return Groups(*(_resolve_process_group(name) if name else None for name in names))


@dataclass(frozen=True)
class Shards:
    """Where each rank's keys stand: padded to the longest shard in the order of ranks, and in the global order."""

    lengths: tuple[int, ...]  # N_r
    layout: str

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def in_order(self) -> bool:
        """Whether the padded shards are the global order as they stand."""
        return self.layout == "contiguous" and len(set(self.lengths)) == 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first row among the padded shards, first row in the global order, rows), in the global order."""
        ranks, step = range(len(self.lengths)), self.longest
        pieces = [(rank * step, self.lengths[rank]) for rank in ranks]
        if self.layout == "zigzag":
            half = step // 2
            pieces = [(rank * step, half) for rank in ranks] + [(rank * step + half, half) for rank in reversed(ranks)]
        position = 0
        for first, rows in pieces:
            yield first, position, rows
            position += rows


class Pending:
    """A tensor that a collective is still filling; `result()` waits for it, on a GPU without the host."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work, self._finish = work, finish  # `finish` keeps what the collective reads and writes

    def result(self) -> Tensor:
        """The tensor; to be called once."""
        if self._work is not None:
            with explained():
                self._work.wait()
        return self._finish()


def gather(kv: Tensor, groups: Groups, shards: Shards) -> Pending:
    """Start to collect every rank's keys, [N, D] in the global order, from this rank's [N_r, D]."""
    if groups.group is None:
        return Pending(None, lambda: kv)
    padded = kv.contiguous()
    if len(kv) < shards.longest:  # all_gather wants equal shards
        padded = kv.new_zeros(shards.longest, kv.shape[1])
        padded[: len(kv)] = kv
    gathered = kv.new_empty(len(shards.lengths) * shards.longest, kv.shape[1])
    work = all_gather(gathered, padded, groups.group)

    def finish(_: Tensor = padded) -> Tensor:
        if shards.in_order:
            return gathered
        return torch.cat([gathered[first : first + rows] for first, _, rows in shards.runs()])

    return Pending(work, finish)


def reduce(dkv: Tensor, groups: Groups, shards: Shards) -> Pending:
    """Start to form this rank's rows, [N_r, D], of the sum over all ranks of dkv, [N, D], in its dtype.

    May overwrite dkv.
    """
    dkv = dkv.contiguous()  # as collectives want it
    mine, padded, work = dkv, dkv, None
    if groups.group is not None:
        if not shards.in_order:
            padded = dkv.new_zeros(len(shards.lengths) * shards.longest, dkv.shape[1])
            for first, position, rows in shards.runs():
                padded[first : first + rows] = dkv[position : position + rows]
        mine = dkv.new_empty(shards.longest, dkv.shape[1])
        work = reduce_scatter(mine, padded, groups.group)
        length = shards.lengths[dist.get_rank(groups.group)]

    def finish(_: Tensor = padded) -> Tensor:
        rows = mine if groups.group is None else mine[:length]
        if groups.tp_group is not None:  # after the other, when a rank holds 1 / R of the rows
            with explained():
                dist.all_reduce(rows, group=groups.tp_group)
        return rows

    return Pending(work, finish)


def exchange(table: Tensor, group: ProcessGroup) -> Tensor:
    """The [n, fields] of every rank of the group, one under the other, on the CPU."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = None if on_cpu else torch.accelerator.current_accelerator()
    mine = table if device is None else table.to(device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(mine), mine.shape[1])
    with explained():
        all_gather(everyone, mine, group).wait()
    return everyone.cpu()


@contextmanager
def explained() -> Iterator[None]:
    """A collective that fails says what that means here."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"slattn.distributed on rank {dist.get_rank()}: another rank did not come to this call. It raised an error "
            "elsewhere, ended, or took longer than the process group's timeout (init_process_group(timeout=...)); "
            f"what it printed says which. {error}"
        ) from error


def all_gather(output: Tensor, mine: Tensor, group: ProcessGroup) -> Any:
    """The Work that fills output with every rank's `mine`."""
    # all_gather_into_tensor is deprecated where all_gather_single is there (torch 2.13).
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    with explained():
        return call(output, mine, group=group, async_op=True)


def reduce_scatter(output: Tensor, parts: Tensor, group: ProcessGroup) -> Any:
    """The Work that fills output with this rank's rows of the sum of all ranks' `parts`."""
    # gloo has it too, inside as an all_reduce; see all_gather for the name.
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    with explained():
        return call(output, parts, group=group, async_op=True)
