"""Where nvcc is, for who has to say so beforehand: `slattn warmup`, `slattn doctor`, the compile tests.

TileLang finds a compiler by itself, and this module looks in the same places in the same order, so that what it
answers is what TileLang runs:

1. `$CUDA_HOME/bin/nvcc`, or `$CUDA_PATH/bin/nvcc`: a named toolkit is the only one tried;
2. `nvcc` on PATH;
3. the pip package nvidia-cuda-nvcc of this interpreter (`site-packages/nvidia/cu13/bin/nvcc`);
4. `/usr/local/cuda/bin/nvcc`.

Tried for number 3 on a machine with no toolkit: nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm 13.0.88,
nvidia-cuda-runtime 13.0.96 and nvidia-cuda-cccl 13.0.85, with the system's g++, compile a `.cu` to a cubin, and with
them TileLang 0.1.15 compiles for sm_80, sm_90a and sm_100a, CUDA_HOME unset and no nvcc on PATH. All five must be of
one CUDA release; mixed ones do not compile. Linking a program (`nvcc -shared`) needs
`-L site-packages/nvidia/cu13/lib` besides, because the packages have no lib64; compiling kernels does not link.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

NVCC_COMMAND = (
    "pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 "
    "nvidia-cuda-cccl==13.0.85"
)
INSTALL_NVCC = f"Set CUDA_HOME to a CUDA toolkit, or unset it and `{NVCC_COMMAND}`"
INSTALL_CXX = "nvcc needs a C++ compiler: `apt-get install g++`, or set CXX"


def find_nvcc() -> str | None:
    """The path of the nvcc that TileLang runs here, None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return _executable(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or _pip_nvcc() or _executable(Path("/usr/local/cuda/bin/nvcc"))


def find_cxx() -> str | None:
    """The C++ compiler that nvcc would use, None where there is none."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    return named or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def _executable(path: Path) -> str | None:
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None


def _pip_nvcc() -> str | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "nvcc":
            return _executable(Path(str(file.locate())))
    return None
