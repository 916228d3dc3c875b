"""The demo over several processes: each holds the same part of every text's positions, and all of the weights.

    torchrun --nproc-per-node 2 -m slattn demo --context-parallel 2

A part is a whole number of pooled blocks, so that every process pools its own keys. Queries see the keys of all parts
through `slattn.distributed.sparse_attention`; the losses are those of one process but for rounding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slattn import distributed
from slattn.commands.edge import UsageError
from slattn.demo.model import Attention, Config, Decoder, Indexer, Rotary


def check(ranks: int, device: str | None) -> None:
    """Refuse a number of processes that is not the one that runs; on a machine with GPUs, make one of them this one's.

    Raises:
        UsageError: as the sentence says.
    """
    if ranks < 1:
        raise UsageError(f"--context-parallel must be at least 1; got {ranks}")
    running = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1  # torchrun sets both
    if ranks == 1 < running:
        raise UsageError(f"torchrun started {running} processes: add --context-parallel {running}, or start it alone")
    if ranks != running:
        raise UsageError(
            f"--context-parallel {ranks} needs {ranks} processes, and this run has {running}: "
            f"torchrun --nproc-per-node {ranks} -m slattn demo --context-parallel {ranks}"
        )
    if ranks == 1 or not torch.cuda.is_available() or not (device or "cuda").startswith("cuda"):
        return
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device not in (None, "cuda"):
        raise UsageError(
            f"--device {device} cannot be used with --context-parallel: each process takes a GPU of its own"
        )
    if local >= gpus:
        raise UsageError(f"--context-parallel {ranks} needs a GPU for each process, and this machine has {gpus}")
    torch.cuda.set_device(local)


@contextmanager
def joined(ranks: int, config: Config, device: torch.device) -> Iterator[Part | None]:
    """This process's part, while it works together with the others; None where there is one process.

    Raises:
        UsageError: a text that cannot be cut into so many parts, or a device whose processes cannot talk.
    """
    if ranks == 1:
        yield None
        return
    if config.sequence % (ranks * config.block):
        blocks = config.sequence // config.block
        raise UsageError(
            f"--context-parallel {ranks} does not divide a text's {blocks} blocks of {config.block} tokens"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--context-parallel needs a CPU or CUDA; got --device {device}")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Part(config)
        dist.barrier()  # none ends before all is written, nor while gloo's threads still let go of its tensors
    finally:
        dist.destroy_process_group()


class Part:
    """This process's positions of every text, and what it asks of the other processes. Every call is collective."""

    def __init__(self, config: Config) -> None:
        self.rank, self.ranks, self.sequence = dist.get_rank(), dist.get_world_size(), config.sequence
        self.block = config.block
        length = config.sequence // self.ranks
        self.positions = slice(self.rank * length, (self.rank + 1) * length)

    def gather(self, rows: Tensor) -> Tensor:
        """Every part's rows, `[B, ranks * n, D]`, of this part's `[B, n, D]`; differentiable once."""
        gathered: Tensor = _Gather.apply(rows, self)
        return gathered

    def gather_keys(self, kv: Tensor) -> distributed.GatheredKeys:
        """Start to collect the keys of all parts, of this part's raw and pooled ones, `[B, n + n // block, D]`."""
        return distributed.gather_keys(kv.flatten(0, 1), group=dist.group.WORLD)

    def attend(
        self, q: Tensor, keys: distributed.GatheredKeys, indices: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`slattn.sparse_attention` of this part's queries with the keys of all parts; returns out and lse.

        Args:
            q: `[B, n, H, D]`.
            keys: what `gather_keys` returned.
            indices: `[B, n, K]` as in one process: position p is key p, pooled key j is key `sequence + j`.
            options: as the operation takes them.
        """
        texts, length = q.shape[:2]
        rows = length + length // self.block
        # The order of the gathered keys: the parts, in each the texts, in each its raw keys before its pooled ones.
        text = torch.arange(texts, device=q.device) * rows
        row = torch.arange(self.ranks, device=q.device)[:, None] * texts * rows + torch.arange(rows, device=q.device)
        place = torch.cat((row[:, :length].flatten(), row[:, length:].flatten()))  # of a key of the first text
        named = place[indices.clamp_min(0).long()] + text[:, None, None]
        flat = named.masked_fill(indices < 0, -1).int().flatten(0, 1)
        out, lse = distributed.sparse_attention(q.flatten(0, 1), keys, flat, return_lse=True, **options)
        return out.unflatten(0, (texts, length)), lse.unflatten(0, (texts, length))

    def average(self, losses: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The mean of the processes' losses, each a mean over as many tokens; the gradients become its own."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        everything = torch.cat([losses, *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(everything)
        everything /= self.ranks
        mean, *summed = everything.split([len(losses), *(gradient.numel() for gradient in gradients)])
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total.view_as(gradient))
        return mean

    def sum(self, value: float) -> float:
        """The sum of the processes' values."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()


def split(model: Decoder, part: Part) -> Decoder:
    """The same model, its very parameters, for the positions of `part`: it takes and gives `[B, n]` tokens."""
    mine = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in mine.modules():
        if isinstance(module, Rotary):
            module.angle = module.angle[part.positions.start :]
        elif isinstance(module, Attention):
            module.slots, module.incomplete = module.slots[part.positions], module.incomplete[part.positions]
        if isinstance(module, (Attention, Indexer)):
            module.part = part
    return mine


class _Gather(torch.autograd.Function):
    """all_gather along dimension 1; the gradients are summed over the processes, in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: Part) -> Tensor:
        ctx.part = part
        rows = rows.contiguous()
        everyone = [torch.empty_like(rows) for _ in range(part.ranks)]
        dist.all_gather(everyone, rows)
        return torch.cat(everyone, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].float().contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(ctx.part.ranks, 1)[ctx.part.rank].to(grads[0].dtype), None
