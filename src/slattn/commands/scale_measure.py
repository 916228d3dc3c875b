"""`torchrun --nproc-per-node 2 -m slattn scale --measure`: what the model predicts, measured where it runs.

The collectives of the keys, the ranks' agreement, the step of all GPUs against one GPU's with the same queries each,
what `gather_keys` hides behind a projection, and the peak of memory. Without GPUs everything runs on gloo at a size
that says nothing about speed, so that the command itself can be tried.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import slattn
from slattn import distributed
from slattn.commands.edge import UsageError
from slattn.commands.scale import GIB, Machine, Model, collective, costs
from slattn.distributed.agreement import Header, agree
from slattn.distributed.collectives import Groups, all_gather, reduce_scatter
from slattn.testing import BENCH_SHAPES, Shape

TRIAL = Shape("trial", 8, 16, 2, 16, 4)  # where there is no GPU
LENGTHS = (8192, 32_768, 131_072, 524_288)  # keys of all ranks
BLOCK, ROUNDS = 0.4, 2  # seconds of a contestant at a time, as in docs/performance.md; the median of so many


def measure(model: Model) -> None:
    """Print it, from rank 0, line by line.

    Raises:
        UsageError: not under torchrun, or fewer GPUs than processes.
    """
    if "LOCAL_RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise UsageError("--measure needs two processes or more: torchrun --nproc-per-node 2 -m slattn scale --measure")
    cuda = torch.cuda.is_available()
    if cuda and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        raise UsageError(f"--measure needs a GPU for each process, and this machine has {torch.cuda.device_count()}")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    try:
        shape = BENCH_SHAPES[model.shape] if cuda else TRIAL
        _say(f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name() if cuda else 'CPU, a trial'}, {shape.name}")
        _links(shape, LENGTHS if cuda else (64,))
        _agreement()
        for keys in (shape.queries * dist.get_world_size(), 16 * shape.queries * dist.get_world_size()):
            _step(model if cuda else None, shape, keys)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _links(shape: Shape, lengths: tuple[int, ...]) -> None:
    """The two collectives of a call alone, and the bytes a second that each rank takes in."""
    ranks, group = dist.get_world_size(), _world()
    for keys in lengths:
        table, mine = _randn(keys, shape.head_dim), _randn(keys // ranks, shape.head_dim)
        wide, sums = table.float(), torch.empty_like(mine, dtype=torch.float32)
        seconds = _timed(
            {
                "all_gather": functools.partial(_waited, all_gather, table, mine, group),
                "reduce_scatter": functools.partial(_waited, reduce_scatter, sums, wide, group),
            }
        )
        for (name, taken), size in zip(seconds.items(), (2 * table.numel(), 4 * table.numel()), strict=True):
            rate, predicted = size * (ranks - 1) / ranks / taken, collective(size, ranks, Machine())
            _say(f"{keys} keys, {name}: {taken * 1e6:.0f} us, {rate / 1e9:.0f} GB/s; model {predicted * 1e6:.0f} us")


def _waited(start: Callable[..., Any], *arguments: Any) -> None:
    start(*arguments).wait()


def _agreement() -> None:
    group = Groups(_world(), None)
    seconds = _timed({"agree": lambda: agree(Header(dist.get_rank()), None, group)})["agree"]
    _say(f"agreement: {seconds * 1e6:.0f} us; model {Machine().agreement * 1e6:.0f} us")


def _step(model: Model | None, shape: Shape, keys: int) -> None:
    """Forward and backward of one layer: on a rank alone with its own keys, and of all ranks with all keys."""
    ranks, group = dist.get_world_size(), _world()
    q = _randn(shape.queries, shape.heads, shape.head_dim).requires_grad_()
    kv = _randn(keys // ranks, shape.head_dim).requires_grad_()
    indices = torch.randint(keys, (shape.queries, shape.slots), device=q.device, dtype=torch.int32)
    own = indices % len(kv)
    grad = _randn(shape.queries, shape.heads, shape.value_dim)

    def step(attend: Callable[[], Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), [q, kv], grad)

    def plain(**options: Any) -> Callable[[], object]:
        return step(lambda: distributed.sparse_attention(q, kv, indices, group=group, **options))

    seconds = _timed(
        {
            "one": step(lambda: slattn.sparse_attention(q, kv, own)),
            "all": plain(),
            "all, kept": plain(keep_gathered=True),
            "all, early": step(
                lambda: distributed.sparse_attention(q, distributed.gather_keys(kv, group=group), indices)
            ),
        }
    )
    text = ", ".join(f"{name} {taken * 1e3:.3f} ms ({taken / seconds['one']:.3f})" for name, taken in seconds.items())
    predicted = ""
    if model is not None and keys == shape.queries * ranks:
        many, one = costs(model, keys, ranks), costs(model, shape.queries, 1)
        predicted = f"; model {many.step * 1e3:.3f} ms ({many.step / one.step:.3f})"
    _say(f"{keys} keys, step: {text}{predicted}")
    _layer(shape, kv, indices, grad, keys)
    if q.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in (q, kv, indices, grad))
        plain()()
        peak = torch.cuda.max_memory_allocated() - before
        _say(f"{keys} keys, peak: {peak / GIB:.3f} GiB" + (f"; model {many.peak_bytes / GIB:.3f}" if predicted else ""))


def _layer(shape: Shape, kv: Tensor, indices: Tensor, grad: Tensor, keys: int) -> None:
    """The same behind a projection that makes q, which early keys travel beside."""
    group = _world()
    x = _randn(shape.queries, 2048 if kv.is_cuda else 8)
    weight = (_randn(shape.heads * shape.head_dim, x.shape[1]) * x.shape[1] ** -0.5).requires_grad_()

    def run(early: bool) -> None:
        held = distributed.gather_keys(kv, group=group) if early else kv
        q = torch.nn.functional.linear(x, weight).view(shape.queries, shape.heads, shape.head_dim)
        out = distributed.sparse_attention(q, held, indices, group=None if early else group)
        torch.autograd.grad(out, [weight, kv], grad)

    seconds = _timed({"plain": lambda: run(False), "early": lambda: run(True)})
    gained = seconds["plain"] - seconds["early"]
    _say(f"{keys} keys, layer: plain {seconds['plain'] * 1e3:.3f} ms, early keys gain {gained * 1e6:.0f} us")


def _randn(*size: int) -> Tensor:
    """bfloat16 on this rank's GPU; float32 where there is none."""
    if torch.cuda.is_available():
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    return torch.randn(*size)


def _timed(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds a call, the slowest rank's, of each at its own steady state; every rank makes the same calls."""
    block = BLOCK if torch.cuda.is_available() else 0.01
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    calls = {}
    for name, call in contestants.items():
        call()  # the first compiles
        calls[name] = max(3, int(block / _slowest(call, 2)))
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            _slowest(call, max(1, calls[name] // 5))  # not counted
            taken[name].append(_slowest(call, calls[name]))
    return {name: statistics.median(values) for name, values in taken.items()}


def _slowest(call: Callable[[], object], times: int) -> float:
    dist.barrier()
    _wait()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    _wait()
    slowest = torch.tensor((time.perf_counter() - begun) / times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
