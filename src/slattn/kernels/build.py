"""Configurations to compiled kernels, once a process each; TileLang keeps the binaries on disk between processes.

What can go wrong on somebody's machine ends here, in a kernel that runs or in a sentence that says what to do.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from slattn.kernels.config import (
    TARGETS,
    BackwardConfig,
    CompactConfig,
    Config,
    FinishConfig,
    ForwardConfig,
    HopperBackwardConfig,
    HopperForwardConfig,
    PrepareConfig,
    SlotProbsConfig,
    TallyConfig,
    UnitsConfig,
    WeighConfig,
)
from slattn.kernels.nvcc import INSTALL_CXX, INSTALL_NVCC, find_cxx, find_nvcc

TESTED = "0.1.15"  # the TileLang that the kernels were tested with
INSTALL = f"pip install tilelang=={TESTED}"


class CompileError(RuntimeError):
    """A kernel cannot be compiled here; the message says why and what mends it."""


@functools.cache
def kernel(config: Config) -> Any:
    """What launches the kernel of a configuration; `kernel.cache_info().misses` counts what was compiled.

    A call of TileLang's own object goes over all arguments in Python, 3 of its 4 us on the host, and ends in a compiled
    function: this one. Another TileLang may have no such function.

    Raises:
        CompileError: where it cannot be compiled, and no earlier process has left it on disk.
    """
    whole = compiled(config)
    executable = getattr(getattr(whole, "adapter", None), "get_exportable_executable", None)
    return whole if executable is None else executable()["main"]


def compiled(config: Config) -> Any:
    """TileLang's object of a compiled configuration. Raises as `kernel` does."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CompileError("run the call once before capturing a CUDA graph: the first call compiles its kernels")
    import tilelang

    _warn_once(untested_version())
    make = functools.partial(
        tilelang.compile, program(config), target=target(config.arch), pass_configs=pass_configs(config)
    )
    try:
        return make()
    except Exception as error:
        problem = cache_problem() if tilelang.is_cache_enabled() else None
        if problem is None:
            raise CompileError(_why(error)) from error
    # TileLang compiles a kernel and then raises because it cannot keep it: once more, with nothing kept.
    _warn_once(problem)
    tilelang.disable_cache()
    try:
        return make()
    except Exception as error:
        raise CompileError(_why(error)) from error
    finally:
        tilelang.enable_cache()


def missing() -> str | None:
    """Why TileLang cannot be used here, in a sentence; None if it can."""
    if importlib.util.find_spec("tilelang") is None:
        return f"TileLang is not installed ({INSTALL})"
    try:
        import tilelang  # noqa: F401
    except Exception as error:  # whatever keeps it from loading, the user is told
        mend = (isinstance(error, OSError) and cache_problem()) or INSTALL
        return f"TileLang does not load: {type(error).__name__}: {error} ({mend})"
    return None


def untested_version() -> str | None:
    """A sentence where the TileLang installed is not the one that the kernels were tested with."""
    try:
        version = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version.split("+")[0] == TESTED:
        return None
    return (
        f"slattn's kernels were tested with TileLang {TESTED}, and {version} is installed: `slattn check` says whether "
        f"they are right with it, and `{INSTALL}` brings the tested one"
    )


def cache_problem() -> str | None:
    """A sentence where TileLang's cache of compiled kernels cannot be written. It is tried: root may write anywhere."""
    cache = Path(os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            (Path(directory) / "room").write_bytes(bytes(2**20))  # a full disk shows in a file alone
    except OSError as error:
        return (
            f"TileLang's cache of compiled kernels, {cache}, cannot be written ({error.strerror}), and each process "
            "compiles its own: set TILELANG_CACHE_DIR to a directory that can be written"
        )
    return None


def _why(error: Exception) -> str:
    """What kept a kernel from being compiled, in a sentence or in the compiler's own words, and the remedy."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if find_nvcc() is None:
        found = f"{home}, which CUDA_HOME or CUDA_PATH names, has no bin/nvcc" if home else "there is no nvcc"
        return f"slattn's kernels cannot be compiled, because {found}. {INSTALL_NVCC}"
    if find_cxx() is None:
        return f"slattn's kernels cannot be compiled, because {INSTALL_CXX}"
    # TileLang puts the whole kernel before what the compiler said, and its command behind.
    words = str(error).rpartition("Compilation error:")[2].partition("\nCommand:")[0].strip()
    return f"slattn's kernels cannot be compiled: {words or type(error).__name__}. {untested_version() or ''}".strip()


@functools.cache
def _warn_once(sentence: str | None) -> None:
    if sentence is not None:
        warnings.warn(sentence, stacklevel=5)


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
    if isinstance(config, HopperForwardConfig):
        from slattn.kernels.hopper_forward import hopper_forward

        return hopper_forward(config)
    if isinstance(config, BackwardConfig):
        from slattn.kernels.backward import backward

        return backward(config)
    if isinstance(config, HopperBackwardConfig):
        from slattn.kernels.hopper_backward import hopper_backward

        return hopper_backward(config)
    if isinstance(config, SlotProbsConfig):
        from slattn.kernels.slot_probs import slot_probs

        return slot_probs(config)
    from slattn.kernels import collect, exact, prepare

    if isinstance(config, TallyConfig):
        return exact.tally(config)
    if isinstance(config, WeighConfig):
        return exact.weigh(config)
    if isinstance(config, UnitsConfig):
        return exact.units(config)
    if isinstance(config, FinishConfig):
        return collect.finish(config)
    if isinstance(config, CompactConfig):
        return prepare.compact(config)
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
