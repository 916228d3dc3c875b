"""A process that compiles kernels, for tests/test_kernel_cache.py, which starts some side by side.

`python kernel_processes.py ROOT ROUND...`: a round is a list of kernels, such as `0.2`, and is begun when the file
ROOT/ROUND appears, with the kernel cache ROOT/cache-ROUND, or TILELANG_CACHE_DIR where that is set. It prints one line
when it is ready and one for each round: a hash of the kernels' CUDA text, or an error; warnings get lines of their own.

What is in SLATTN_TEST_READ_ONLY is a file system that cannot be written: root is let into any directory.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from slattn.kernels import build
from slattn.kernels.config import TARGETS, PrepareConfig

make_directory = os.mkdir


def kernel(number: int) -> PrepareConfig:
    """Small kernels, each of its own: the cache in the process's memory never has it, whatever was compiled before."""
    size = 1 + number // len(TARGETS)
    return PrepareConfig(list(TARGETS)[number % len(TARGETS)], rows=8 * size, threads=64 * size)


def read_only(path: str, *args: Any, **kwargs: Any) -> None:
    if str(path).startswith(os.environ.get("SLATTN_TEST_READ_ONLY", "\0")) and not os.path.isdir(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    make_directory(path, *args, **kwargs)


def say(text: object) -> None:
    print(text, flush=True)


def main(root: Path, rounds: list[str]) -> None:
    os.mkdir = read_only
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    fixed = "TILELANG_CACHE_DIR" in os.environ
    os.environ.setdefault("TILELANG_CACHE_DIR", str(root / "at-import"))
    reason = build.missing()
    logging.getLogger("tilelang").setLevel(logging.ERROR)
    say(reason or "ready")
    for name in rounds:
        while not (root / name).exists():
            time.sleep(0.001)
        if not fixed:
            os.environ["TILELANG_CACHE_DIR"] = str(root / f"cache-{name}")
        try:
            texts = [build.compiled(kernel(int(number))).get_kernel_source() for number in name.split(".")]
            say(hashlib.sha256("".join(sorted(texts)).encode()).hexdigest())
        except Exception as error:
            say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
