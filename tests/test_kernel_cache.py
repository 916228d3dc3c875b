"""Compiling kernels on other people's machines: many processes, damaged and closed caches, no compiler, any version.

The processes are tests/kernel_processes.py. SLATTN_ROUNDS: how often eight of them begin together with an empty cache.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slattn
from slattn.backends import tilelang as backend
from slattn.commands import doctor
from slattn.kernels import build
from slattn.kernels.config import PrepareConfig
from slattn.kernels.nvcc import find_nvcc

ROUNDS = int(os.environ.get("SLATTN_ROUNDS", "1"))
SECONDS = 300  # for what takes 20 on two idle cores
WORKER = Path(__file__).with_name("kernel_processes.py")
NO_NVCC = {"CUDA_HOME": "/nowhere"}

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")


def start(root: Path, *rounds: str, **environment: str) -> subprocess.Popen[str]:
    root.mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(slattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name != "TILELANG_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(root), *rounds],
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
    )


def compile_in_a_process(root: Path, *rounds: str, **environment: str) -> list[str]:
    """The lines of one process, after the one that says that it is ready and without TileLang's own."""
    with start(root, *rounds, **environment) as process:
        for name in rounds:
            (root / name).touch()
        first, *rest = process.communicate(timeout=SECONDS)[0].splitlines()
    assert first == "ready"
    return [line for line in rest if "[TileLang:" not in line]


@needs_nvcc
def test_eight_processes_begin_with_an_empty_cache(tmp_path: Path):
    """All have the same kernel, one complete entry is left, and a process that cannot compile lives on it."""
    pytest.importorskip("tilelang", reason=build.INSTALL)
    rounds = [str(number) for number in range(ROUNDS)]
    processes = [start(tmp_path, *rounds) for _ in range(8)]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 8
        for name in rounds:
            (tmp_path / name).touch()
            texts = {process.stdout.readline() for process in processes}
            assert len(texts) == 1
            assert len(texts.copy().pop()) == 65, texts  # a hash, and no error
            cache = tmp_path / f"cache-{name}"
            assert len(list(cache.glob("*/*/kernels/*/manifest.json"))) == len(list(cache.glob("*/*/kernels/*"))) == 1
            assert not list(cache.glob("*/*/.staging/*"))
        assert [process.wait(SECONDS) for process in processes] == [0] * 8
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert compile_in_a_process(tmp_path, *rounds[-1:], **NO_NVCC) == [texts.pop().strip()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that holds kernels 0 and 1, and what a process says that has them."""
    if find_nvcc() is None:
        pytest.skip("needs nvcc")
    pytest.importorskip("tilelang", reason=build.INSTALL)
    root = tmp_path_factory.mktemp("compiled")
    (said,) = compile_in_a_process(root, "0.1")
    assert len(said) == 64, said
    return root / "cache-0.1", said


@needs_nvcc
def test_what_launches_a_kernel_is_tilelangs_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It looks at its arguments, and wants them on a GPU."""
    pytest.importorskip("tilelang", reason=build.INSTALL)
    import tvm_ffi

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    launch = build.kernel(PrepareConfig(90, rows=8))
    assert isinstance(launch, tvm_ffi.Function)
    x, row = torch.zeros(8, 8, 64).bfloat16(), torch.zeros(8)
    with pytest.raises(RuntimeError, match="expected cuda"):
        launch(x, x, row, row, row, row, row, 1, 1, 1, row, 1, row.int(), 1)


def copied(cache: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(cache), str(to)], check=True)
    return to


def test_kernels_are_found_whatever_was_compiled_before_them(compiled: tuple[Path, str], tmp_path: Path):
    cache, said = compiled
    assert compile_in_a_process(tmp_path, "1.0", TILELANG_CACHE_DIR=str(cache), **NO_NVCC) == [said]


def truncate(file: Path) -> None:
    os.truncate(file, 100)


def overwrite(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)


def test_damaged_entries_are_compiled_again(compiled: tuple[Path, str], tmp_path: Path):
    """A truncated library and a byte that changed, with the device binaries damaged alike; mended for the next one."""
    cache, said = copied(compiled[0], tmp_path / "cache"), compiled[1]
    for pattern in ("*/*/kernels/*/executable.so", "*/cuda-binaries/*/kernel.cubin"):
        for damage, file in zip((truncate, overwrite), sorted(cache.glob(pattern)), strict=True):
            damage(file)
    assert compile_in_a_process(tmp_path, "0.1", TILELANG_CACHE_DIR=str(cache)) == [said]
    assert compile_in_a_process(tmp_path, "0.1", TILELANG_CACHE_DIR=str(cache), **NO_NVCC) == [said]


def test_a_read_only_cache_serves_what_it_has(compiled: tuple[Path, str], tmp_path: Path):
    closed = {"TILELANG_CACHE_DIR": str(compiled[0]), "SLATTN_TEST_READ_ONLY": str(compiled[0])}
    assert compile_in_a_process(tmp_path, "0.1", **closed, **NO_NVCC) == [compiled[1]]


def test_what_a_read_only_cache_has_not_is_compiled_with_a_warning(compiled: tuple[Path, str], tmp_path: Path):
    closed = {"TILELANG_CACHE_DIR": str(compiled[0]), "SLATTN_TEST_READ_ONLY": str(compiled[0])}
    warning, said = compile_in_a_process(tmp_path, "2", **closed)
    assert warning.startswith(f"warning: TileLang's cache of compiled kernels, {compiled[0]}, cannot be written (Read-")
    assert "set TILELANG_CACHE_DIR to a directory that can be written" in warning
    assert len(said) == 64, said


def test_a_cache_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path):
    """TileLang does not even load then."""
    pytest.importorskip("tilelang", reason=build.INSTALL)
    with start(tmp_path, TILELANG_CACHE_DIR="/dev/null/cache") as process:
        (said,) = process.communicate(timeout=SECONDS)[0].splitlines()
    assert said.startswith("TileLang does not load: NotADirectoryError")
    assert "set TILELANG_CACHE_DIR" in said


def test_without_nvcc_the_error_says_what_to_install(tmp_path: Path):
    pytest.importorskip("tilelang", reason=build.INSTALL)
    (said,) = compile_in_a_process(tmp_path, "0", **NO_NVCC)
    assert said.startswith("CompileError: slattn's kernels cannot be compiled, because /nowhere, which CUDA_HOME or")
    assert "pip install nvidia-cuda-nvcc==" in said


# What compiling raises, with a stand-in for TileLang.
Compile = Callable[..., Any]


@pytest.fixture
def tilelang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[types.SimpleNamespace]:
    module: Any = types.SimpleNamespace(compile=lambda *_, **__: "compiled", enabled=True)
    module.is_cache_enabled = lambda: module.enabled
    module.disable_cache = lambda: setattr(module, "enabled", False)
    module.enable_cache = lambda: setattr(module, "enabled", True)
    monkeypatch.setitem(sys.modules, "tilelang", module)
    monkeypatch.setattr(build, "program", lambda config: None)
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: build.TESTED)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    for function in (build.kernel, build._warn_once):
        function.cache_clear()
    yield module
    for function in (build.kernel, build._warn_once):
        function.cache_clear()


def failing(words: str) -> Compile:
    def compile(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    return compile


def test_what_the_compiler_said_without_the_kernel_before_it(tilelang: Any):
    tilelang.compile = failing("void main() {\n}\n\nCompilation error:\nnvcc fatal: old gcc\n\nCommand: nvcc -O3\n")
    with pytest.raises(build.CompileError, match=r"^slattn's kernels cannot be compiled: nvcc fatal: old gcc\.$"):
        build.kernel(PrepareConfig(90))


def test_an_error_without_words_has_its_name(tilelang: Any):
    tilelang.compile = failing("")
    with pytest.raises(build.CompileError, match="cannot be compiled: RuntimeError"):
        build.kernel(PrepareConfig(90))


def test_without_a_cpp_compiler(tilelang: Any, monkeypatch: pytest.MonkeyPatch):
    tilelang.compile = failing("nvcc fatal: -ccbin=None")
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(build.CompileError, match=r"nvcc needs a C\+\+ compiler: `apt-get install g\+\+`"):
        build.kernel(PrepareConfig(90))


def test_the_cache_is_on_again_after_a_failure(tilelang: Any, monkeypatch: pytest.MonkeyPatch):
    tilelang.compile = failing("no")
    monkeypatch.setattr(build, "cache_problem", lambda: "closed")
    with pytest.warns(UserWarning, match="closed"), pytest.raises(build.CompileError):
        build.kernel(PrepareConfig(90))
    assert tilelang.enabled


def test_another_tilelang_warns_once_and_is_named_in_an_error(tilelang: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.99")
    with pytest.warns(
        UserWarning, match=rf"tested with TileLang {build.TESTED}, and 0\.1\.99 is installed: `slattn ch"
    ):
        assert build.kernel(PrepareConfig(90)) == "compiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build.kernel(PrepareConfig(80))
    tilelang.compile = failing("no")
    with pytest.raises(build.CompileError, match=r"cannot be compiled: no. .*0\.1\.99 is installed"):
        build.kernel(PrepareConfig(100))


def test_a_build_of_the_tested_version_is_tested(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{build.TESTED}+cu130")
    assert build.untested_version() is None


def test_a_first_call_inside_a_capture_is_refused(tilelang: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(build.CompileError, match="run the call once before capturing a CUDA graph"):
        build.kernel(PrepareConfig(90))


def test_a_home_that_is_none(monkeypatch: pytest.MonkeyPatch):
    """As in a container whose user has no folder."""
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    assert "/dev/null/.tilelang/cache, cannot be written (Not a directory)" in build.cache_problem()


def test_doctor_warns_of_all_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(doctor, "_package_version", lambda name: "0.1.99")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.99")
    monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/dev/null/cache")
    print(doctor._text(doctor.gather()))
    text = capsys.readouterr().out
    for words in ("and 0.1.99 is installed", "/dev/null/cache, cannot be written", "there is no nvcc"):
        assert any(line.startswith("warning: ") and words in line for line in text.splitlines()), words


def test_a_tilelang_that_does_not_load_is_quoted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.missing() == f"TileLang is not installed ({build.INSTALL})"
    monkeypatch.undo()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tilelang", None)
    assert build.missing() is not None
    assert f"({build.INSTALL})" in build.missing()
    backend._machine_refusal.cache_clear()
    assert backend._machine_refusal(0) == build.missing()
    backend._machine_refusal.cache_clear()
