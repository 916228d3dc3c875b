"""`slattn warmup`: compiles kernels before the first call needs them.

TileLang keeps binaries on disk, so that every later process only loads them. No GPU is needed where --arch says for
which one: the image of a container can be warmed when it is built.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import as_completed
from itertools import product

import torch

from slattn.commands import ahead
from slattn.commands.edge import UsageError
from slattn.commands.progress import Progress
from slattn.kernels import build
from slattn.kernels.config import TARGETS, VALUE_DIMS, Config, architecture, slot_probs_config
from slattn.kernels.needed import claimed, needed
from slattn.kernels.nvcc import INSTALL_NVCC, find_nvcc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slattn warmup`."""
    parser.add_argument(
        "--heads", type=int, nargs="+", metavar="H", help="head counts of a rank (default: every kernel)"
    )
    parser.add_argument(
        "--head-dim", type=int, nargs="+", metavar="D", choices=VALUE_DIMS, help="64, 128, 256, 512, 576"
    )
    parser.add_argument("--grad-lse", action="store_true", help="for a loss that reads the log-sum-exp")
    parser.add_argument("--deterministic", action="store_true", help="for deterministic gradients")
    parser.add_argument("--slot-probs", action="store_true", help="for attention_slot_probs too")
    parser.add_argument("--arch", type=int, choices=TARGETS, help="default: the GPU here")
    parser.add_argument(
        *("--jobs", "-j"),
        type=int,
        default=ahead.default_processes(),
        help="kernels compiled at once, a process each (default: one a core, up to 12)",
    )


def main(args: argparse.Namespace) -> int:
    """Compile what the options ask for, everything without --heads; exit status 1 where a kernel does not compile."""
    configs = _configs(args, _arch(args))
    reason = build.missing() or build.cache_problem()  # what cannot be kept would be compiled for nothing
    if reason is not None:
        raise UsageError(reason)
    if find_nvcc() is None:
        raise UsageError(f"there is no nvcc, which TileLang compiles with. {INSTALL_NVCC}")
    start, failures = time.monotonic(), []
    with ahead.processes(min(args.jobs, len(configs))) as pool, Progress(len(configs)) as progress:
        futures = {pool.submit(ahead.compile_own, config): config for config in configs}
        for future in as_completed(futures):
            progress.step(type(futures[future]).__name__)
            error = future.exception()
            if error is not None:
                lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                failures.append(f"{futures[future]}: {lines[-1]}")
    for failure in failures:
        print(failure)
    ready = len(configs) - len(failures)
    print(f"{ready} of {len(configs)} kernels are ready, after {time.monotonic() - start:.0f} s, in {_cache()}")
    return 1 if failures else 0


def _arch(args: argparse.Namespace) -> int:
    if args.arch is not None:
        return int(args.arch)
    if not torch.cuda.is_available():
        raise UsageError(f"there is no CUDA device here: say for which --arch, one of {', '.join(map(str, TARGETS))}")
    capability = torch.cuda.get_device_capability()
    arch = architecture(capability)
    if arch is None:
        raise UsageError(f"there are no kernels for compute capability {capability[0]}.{capability[1]}")
    return arch


def _configs(args: argparse.Namespace, arch: int) -> list[Config]:
    if args.jobs < 1:
        raise UsageError(f"--jobs must be 1 or more; got {args.jobs}")
    if (args.heads is None) != (args.head_dim is None):
        raise UsageError("--heads and --head-dim go together; without them every kernel is compiled")
    if args.heads is None:
        return [config for config in claimed() if config.arch == arch]
    if any(not 1 <= heads <= 256 for heads in args.heads):
        raise UsageError(f"--heads must be from 1 to 256; got {' '.join(map(str, args.heads))}")
    configs: list[Config] = []
    for heads, head_dim in product(args.heads, args.head_dim):
        configs += needed(arch, heads, head_dim, grad_lse=args.grad_lse, deterministic=args.deterministic)
        if args.slot_probs:
            configs.append(slot_probs_config(arch, heads, head_dim))
    return list(dict.fromkeys(configs))


def _cache() -> str:
    return os.environ.get("TILELANG_CACHE_DIR") or "TileLang's cache (~/.tilelang, or TILELANG_CACHE_DIR)"
