"""`slattn doctor`: what is installed, which backends run here, and what mends those that do not.

Every probe is guarded: what cannot be found out is said to be unknown, and the exit status is 0 whatever is missing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import slattn
from slattn import backends
from slattn.backends import vendor_runtimes
from slattn.kernels import build
from slattn.kernels.nvcc import INSTALL_CXX, INSTALL_NVCC, NVCC_COMMAND, find_cxx, find_nvcc
from slattn.problem import Problem

# Distribution -> what it is to this library.
PACKAGES = {
    "tilelang": "compiles the library's own kernels",
    "apache-tvm-ffi": "TileLang's runtime",
    "nvidia-cudnn-frontend": "backward of the vendor pair",
    "nvidia-cutlass-dsl": "what the cuDNN frontend compiles with",
    "flash-mla": "forward of the vendor pair, built from source",
    "sglang-kernel": "a FlashMLA from a package",
    "nemo-automodel": "a peer that `slattn bench` measures",
}

# Backend -> groups of modules of which one has to be importable, and the line that brings them.
_NEEDS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "tilelang": ((("tilelang",), build.INSTALL),),
    "flashmla_cudnn": (
        (("cudnn",), vendor_runtimes.CUDNN_COMMAND),
        (("flash_mla", "sgl_kernel"), vendor_runtimes.FLASH_MLA_COMMAND),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the report; always 0."""
    report = gather()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def gather() -> dict[str, Any]:
    """What is known of this machine, as `--json` prints it."""
    return {
        "slattn": slattn.__version__,
        "python": platform.python_version(),
        "platform": _guarded(platform.platform),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_cudnn": _guarded(torch.backends.cudnn.version),
        "driver": _guarded(_driver),
        "nvcc": _guarded(_nvcc),
        "C++ compiler": _guarded(find_cxx),
        "devices": _guarded(_devices),
        "packages": {name: _guarded(functools.partial(_package_version, name)) for name in PACKAGES},
        "backends": {name: _backend(name) for name in backends.MODULES},
        "warnings": _guarded(_warnings),
    }


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # a broken installation may raise anything on import; the report is the point
        return f"unknown ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    return answer[0] if answer else None


def _nvcc() -> str | None:
    path = find_nvcc()
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    release = next((line.split("release ")[1].split(",")[0] for line in answer.splitlines() if "release " in line), "?")
    return f"{path} ({release})"


def _warnings() -> list[str]:
    """What a kernel that is to be compiled here will meet; nothing without TileLang."""
    if _package_version("tilelang") is None:
        return []
    nvcc = None if find_nvcc() else f"there is no nvcc, so that no kernel can be compiled. {INSTALL_NVCC}"
    cxx = None if find_cxx() else f"no kernel can be compiled: {INSTALL_CXX}"
    return [sentence for sentence in (build.untested_version(), build.cache_problem(), nvcc, cxx) if sentence]


def _devices() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return devices


def _backend(name: str) -> dict[str, Any]:
    """Whether a backend takes a DeepSeek-V4 training call here; if not, why, and the line that mends it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = Problem(
        batch=1,
        queries=4096,
        keys=8192,
        heads=64,
        slots=640,
        head_dim=512,
        value_dim=512,
        scale=512**-0.5,
        dtype=torch.bfloat16,
        device=device,
        deterministic=False,
    )
    try:
        reason = backends.load(name).refusal(problem)
        if reason is not None and device.type == "cpu":
            reason = "it needs an NVIDIA GPU, and torch finds none here"
    except Exception as error:
        reason = f"it does not load: {type(error).__name__}: {_first_line(error)}"
    return {"runs": reason is None, "why_not": reason, "mend": reason and _guarded(lambda: _mend(name))}


def _mend(name: str) -> str | None:
    if not torch.cuda.is_available() and shutil.which("nvidia-smi") and torch.version.cuda is None:
        return "pip install a CUDA build of torch: this machine has an NVIDIA driver, and this torch is a CPU build"
    lines = [line for modules, line in _NEEDS.get(name, ()) if not any(map(_importable, modules))]
    if name == "tilelang" and find_nvcc() is None:
        lines.append(NVCC_COMMAND)
    if name == "tilelang" and find_cxx() is None:
        lines.append("apt-get install g++")
    if not lines:
        return None
    return ("" if torch.cuda.is_available() else "on a machine with an NVIDIA GPU, ") + " && ".join(lines)


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _text(report: dict[str, Any]) -> str:
    rows = [(key, report[key]) for key in ("slattn", "python", "platform", "torch")]
    rows.append(("CUDA of torch", report["torch_cuda"] or "none: a CPU build"))
    rows += [(key, report[key] or "not found") for key in ("driver", "nvcc", "C++ compiler")]
    devices = report["devices"]
    if isinstance(devices, list):
        for device in devices:
            text = "{name}, compute capability {capability}, {memory_gib} GiB, {multiprocessors} multiprocessors"
            rows.append(("device", text.format(**device)))
    if not isinstance(devices, list) or not devices:
        rows.append(("device", devices or "no CUDA device"))
    rows += [(f"{name}", f"{report['packages'][name] or 'not installed'}  ({PACKAGES[name]})") for name in PACKAGES]
    width = max(len(key) for key, _ in rows) + 2
    lines = [f"{key:<{width}}{value}" for key, value in rows]
    lines.append("")
    for name, state in report["backends"].items():
        lines.append(f"backend {name:<16}{'runs here' if state['runs'] else 'does not run here: ' + state['why_not']}")
        if state["mend"]:
            lines.append(f"{'':<24}mend it: {state['mend']}")
    warnings = report["warnings"]
    lines += [f"warning: {each}" for each in (warnings if isinstance(warnings, list) else [warnings])]
    return "\n".join(lines)
