"""The arithmetic of deterministic mode, the CUDA text itself, on a CPU: `exact_on_a_cpu.cpp` says what is checked."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slattn.kernels.exact_cuda import EXACT_PRELUDE


def for_a_cpu(text):
    """The text with C++ in place of what is PTX."""
    for ptx, plain in (
        (r"asm volatile\(\"mov\.u32 %0.*?;\" : .*?\);", "x = thread_now();"),
        (
            r"(?s)asm volatile\(\"\{\.reg \.pred p;.*?: \"memory\"\);",
            "if (counts) *reinterpret_cast<unsigned long long*>(to) += (high + 0ull) << 32 | low;",
        ),
    ):
        text, replaced = re.subn(ptx, plain, text)
        assert replaced == 1, ptx
    assert "asm" not in text
    return text


def test_the_sums_are_exact(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    (tmp_path / "prelude.h").write_text(for_a_cpu(EXACT_PRELUDE))
    program = tmp_path / "exact"
    source = Path(__file__).with_name("exact_on_a_cpu.cpp")
    # Without contraction: the text says itself where it wants a multiplication and an addition in one.
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", f"-I{tmp_path}"]
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout[:2000]) == (0, "")
