"""`slattn warmup`: what it compiles for which options, and how it ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from slattn.cli import main
from slattn.commands import ahead, warmup
from slattn.kernels.config import (
    BackwardConfig,
    CompactConfig,
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
from slattn.kernels.needed import claimed, needed


@pytest.fixture
def compiled(monkeypatch):
    """What would have been compiled, in threads of this process."""
    seen = []

    @contextmanager
    def threads(count):
        with ThreadPoolExecutor(count) as pool:
            yield pool

    monkeypatch.setattr(ahead, "processes", threads)
    monkeypatch.setattr(ahead, "compile_own", seen.append)
    monkeypatch.setattr(warmup, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(warmup.build, "missing", lambda: None)
    return seen


def kinds(configs):
    return sorted(type(config).__name__ for config in configs)


def test_what_a_shape_needs(compiled, capsys):
    assert main(["warmup", "--heads", "64", "--head-dim", "512", "--arch", "90", "-j", "2"]) == 0
    expected = [HopperBackwardConfig, HopperForwardConfig, PrepareConfig, CompactConfig, *[FinishConfig] * 2]
    assert kinds(compiled) == sorted(kind.__name__ for kind in expected)
    assert capsys.readouterr().out.startswith("6 of 6 kernels are ready, after ")


def test_options_add_to_it(compiled):
    assert (
        main(["warmup", "--heads", "16", "64", "--head-dim", "576", "--arch", "90", "--deterministic", "--slot-probs"])
        == 0
    )
    assert {type(config) for config in compiled} == {
        *(HopperBackwardConfig, BackwardConfig, HopperForwardConfig, ForwardConfig, PrepareConfig, CompactConfig),
        *(TallyConfig, WeighConfig, UnitsConfig, FinishConfig, SlotProbsConfig),
    }
    mains = [config for config in compiled if isinstance(config, (HopperBackwardConfig, BackwardConfig, FinishConfig))]
    assert all(config.deterministic for config in mains)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_everything_without_a_shape(compiled, arch):
    assert main(["warmup", "--arch", str(arch)]) == 0
    assert set(compiled) == {config for config in claimed() if config.arch == arch}


def test_elsewhere_the_portable_backward_needs_no_lists():
    assert [type(config) for config in needed(80, 64, 512)] == [BackwardConfig, ForwardConfig, PrepareConfig]


def test_a_kernel_that_does_not_compile_is_told(compiled, monkeypatch, capsys):
    def compile_own(config):
        if isinstance(config, PrepareConfig):
            raise RuntimeError("nvcc said:\nno space left\n")
        compiled.append(config)

    monkeypatch.setattr(ahead, "compile_own", compile_own)
    assert main(["warmup", "--heads", "8", "--head-dim", "64", "--arch", "80"]) == 1
    out = capsys.readouterr().out
    assert "PrepareConfig(arch=80" in out
    assert "no space left" in out
    assert "2 of 3 kernels are ready" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--arch 90 --heads 64", "--heads and --head-dim go together"),
        ("--arch 90 --heads 0 --head-dim 512", "--heads must be from 1 to 256; got 0"),
        ("--arch 90 --jobs 0", "--jobs must be 1 or more; got 0"),
    ],
)
def test_what_cannot_be_done_is_said_first(compiled, options, words, capsys):
    assert main(["warmup", *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert not compiled


@pytest.mark.usefixtures("compiled")
def test_a_cache_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/dev/null/cache")
    assert main(["warmup", "--heads", "64", "--head-dim", "512", "--arch", "90"]) == 2
    assert "set TILELANG_CACHE_DIR to a directory that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["tilelang", "nvcc"])
@pytest.mark.usefixtures("compiled")
def test_without_a_compiler_it_says_what_to_install(monkeypatch, missing, capsys):
    if missing == "tilelang":
        monkeypatch.setattr(warmup.build, "missing", lambda: "TileLang is not installed (pip install tilelang)")
    else:
        monkeypatch.setattr(warmup, "find_nvcc", lambda: None)
    assert main(["warmup", "--arch", "90"]) == 2
    words = {"tilelang": "TileLang is not installed (pip install", "nvcc": "there is no nvcc"}
    assert words[missing] in capsys.readouterr().err


@pytest.mark.usefixtures("compiled")
def test_without_a_gpu_it_asks_for_which(monkeypatch, capsys):
    monkeypatch.setattr(warmup.torch.cuda, "is_available", lambda: False)
    assert main(["warmup"]) == 2
    assert "say for which --arch, one of 80, 90, 100" in capsys.readouterr().err


@pytest.mark.usefixtures("compiled")
def test_a_gpu_without_kernels_is_named(monkeypatch, capsys):
    monkeypatch.setattr(warmup.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warmup.torch.cuda, "get_device_capability", lambda: (7, 5))
    assert main(["warmup"]) == 2
    assert "no kernels for compute capability 7.5" in capsys.readouterr().err
