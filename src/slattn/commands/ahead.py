"""Kernels compiled before they are needed, by a bench or by `slattn warmup`: several at once, each in its own process.

TileLang keeps binaries on disk, so what a process compiled here is only loaded where it is measured. What fails here
fails again there, and is told there. cuDNN keeps its kernels in the process that compiled them; they are not for this.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch

from slattn import testing
from slattn.commands.edge import quiet_tilelang
from slattn.kernels.config import VALUE_DIMS, Config, architecture
from slattn.kernels.needed import needed
from slattn.peers import PEERS

Job = tuple[Callable[..., None], tuple[Any, ...]]


def default_processes() -> int:
    """One a core, but no more than a bench of all shapes has kernels; more would wait for the disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 12)


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count` processes; what has not begun when the block ends is not done."""
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(cancel_futures=True)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a word; the bench has one
    quiet_tilelang()


def submit(pool: ProcessPoolExecutor, jobs: Iterable[Job]) -> list[Future[None]]:
    """Begin the jobs."""
    return [pool.submit(function, *arguments) for function, arguments in jobs]


def wait(futures: Sequence[Future[None]], report: Callable[[], None]) -> None:
    """Until all are done, well or badly; `report` hears of each."""
    for future in as_completed(futures):
        future.exception()
        report()


def own_jobs(calls: Iterable[tuple[int, int, dict[str, bool]]], capability: tuple[int, int]) -> list[Job]:
    """One for each kernel that calls of (heads, head dimension, options of `needed`) need on such a device."""
    arch = architecture(capability)
    if arch is None:
        return []
    configs = [
        config
        for heads, head_dim, options in calls
        if head_dim in VALUE_DIMS
        for config in needed(arch, heads, head_dim, **options)
    ]
    return [(compile_own, (config,)) for config in dict.fromkeys(configs)]


def compile_own(config: Config) -> None:
    """One kernel of this library."""
    from slattn.kernels.build import kernel

    kernel(config)


def peer_jobs(shapes: Iterable[testing.Shape], passes: Sequence[str], device: torch.device, seed: int) -> list[Job]:
    """One for each shape and peer whose kernels TileLang compiles."""
    names = [peer.name for peer in PEERS if "TileLang" in peer.name and peer.missing() is None]
    return [(call_peer, (name, shape, tuple(passes), str(device), seed)) for shape in shapes for name in names]


def call_peer(name: str, shape: testing.Shape, passes: Sequence[str], device: str, seed: int) -> None:
    """One call of each pass, on inputs like those that are measured: it compiles what they take."""
    peer = next(peer for peer in PEERS if peer.name == name)
    inputs = testing.bench_inputs(shape, device, seed)
    try:
        for pass_, make in (("fwd", peer.make_forward), ("bwd", peer.make_backward)):
            if pass_ in passes and make is not None:
                make(inputs)()
        torch.cuda.synchronize(device)
    finally:
        del inputs
        torch.cuda.empty_cache()
