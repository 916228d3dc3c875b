"""Configurations to compiled kernels, once a process each; TileLang keeps the binaries on disk between processes."""

from __future__ import annotations

import functools
from typing import Any

from slattn.kernels.config import (
    TARGETS,
    BackwardConfig,
    CompactConfig,
    Config,
    FinishConfig,
    FoldConfig,
    ForwardConfig,
    HopperBackwardConfig,
    PrepareConfig,
    SlotProbsConfig,
)


@functools.cache
def kernel(config: Config) -> Any:
    """The compiled kernel of a configuration; `kernel.cache_info().misses` counts what was compiled."""
    import tilelang

    return tilelang.compile(program(config), target=target(config.arch), pass_configs=pass_configs(config))


def source(config: Config) -> str:
    """The CUDA text of a configuration, made without nvcc or a GPU."""
    import tilelang
    from tilelang import tvm

    where = tvm.target.Target(target(config.arch))
    with where, tilelang.transform.PassContext(opt_level=3, config=pass_configs(config)):
        return str(tilelang.lower(program(config), target=where).kernel_source)


def program(config: Config) -> Any:
    """The TileLang program of a configuration."""
    if isinstance(config, ForwardConfig):
        from slattn.kernels.forward import forward

        return forward(config)
    if isinstance(config, BackwardConfig):
        from slattn.kernels.backward import backward

        return backward(config)
    if isinstance(config, HopperBackwardConfig):
        from slattn.kernels.hopper_backward import hopper_backward

        return hopper_backward(config)
    if isinstance(config, SlotProbsConfig):
        from slattn.kernels.slot_probs import slot_probs

        return slot_probs(config)
    from slattn.kernels import prepare

    if isinstance(config, CompactConfig):
        return prepare.compact(config)
    if isinstance(config, FoldConfig):
        return prepare.fold(config)
    if isinstance(config, FinishConfig):
        return prepare.finish(config)
    return prepare.prepare(config)


def target(arch: int, *, runs_on: tuple[str, ...] = ()) -> dict[str, Any]:
    """What TileLang compiles for. `runs_on`: also assembled for these newer ones, such as sm_90 for an SM80 kernel."""
    where: dict[str, Any] = {"kind": "cuda", "arch": TARGETS[arch]}
    return where | ({"code": [TARGETS[arch], *runs_on]} if runs_on else {})


def pass_configs(config: Config) -> dict[str, Any]:
    """TileLang's switches. The programs place their own barriers and guard their own addresses.

    Its pass that merges shared memory aggressively stays off: it overwrote live buffers in backward kernels of this
    kind (tile-ai/tilelang issue 2199).
    """
    return {
        "tl.disable_tma_lower": not isinstance(config, HopperBackwardConfig),
        "tl.disable_warp_specialized": True,
        "tl.disable_thread_storage_sync": not isinstance(config, PrepareConfig),
        "tl.disable_safe_memory_legalize": True,
        "tl.enable_aggressive_shared_memory_merge": False,
        "tl.enable_fast_math": not getattr(config, "reference_rounding", False),
    }
