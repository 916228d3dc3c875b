"""What commands refuse before they begin, how they end where their output cannot go, and what is compiled ahead."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from slattn import cli, peers, testing
from slattn.commands import ahead, bench, check, edge, progress
from slattn.kernels import config
from slattn.kernels.nvcc import find_nvcc

TINY = "4,16,2,16,8"
BENCH = ("bench", "--device", "cpu", "--quick", "--shape", TINY)
ROW = dict.fromkeys(("ms", "burst_ms", "tflops", "burst_tflops", "of_matmul", "of_best_peer")) | {
    "shape": TINY,
    "direction": "fwd",
    "name": "reference",
    "kind": "backend",
    "note": "was not measured",
}
RESULT = {"date": "today", "machine": {"devices": [], "torch": "2", "slattn": "0"}, "rows": [ROW]}


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that runs, or a measurement that begins, is a failure of the test."""

    def begun(*arguments: Any, **keywords: Any) -> None:
        pytest.fail("it began")

    monkeypatch.setattr(bench, "gate", begun)
    monkeypatch.setattr(bench, "bench_group", begun)
    monkeypatch.setattr(check, "run_cases", begun)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence on stderr of a command that ends with 2 and has printed nothing else."""
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    return output.err


@pytest.mark.usefixtures("_nothing_runs")
class TestRefusals:
    @pytest.mark.parametrize("option", ["--json", "--plot"])
    def test_a_file_that_cannot_be_written(
        self, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        lost = str(tmp_path / "nowhere" / "x.png")
        assert f"{option} {lost} cannot be written to: No such file" in refused(capsys, *BENCH, option, lost)
        folder = tmp_path / "folder.png"
        folder.mkdir()
        assert f"{option} {folder} cannot be written to" in refused(capsys, *BENCH, option, str(folder))

    def test_a_picture_of_a_kind_that_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        assert ".png, .pdf, .svg" in refused(capsys, *BENCH, "--plot", str(tmp_path / "x.xyz"))

    def test_a_plot_without_matplotlib(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(edge.importlib.util, "find_spec", lambda name: None)
        assert "needs matplotlib" in refused(capsys, *BENCH, "--plot", "x.png")

    @pytest.mark.parametrize("seed", ["-1", str(2**63)])
    @pytest.mark.parametrize("command", ["bench", "check"])
    def test_a_seed_that_is_none(self, command: str, seed: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main([command, "--seed", seed])
        assert f"must be at least 0 and below 2**63; got {seed}" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["bench", "check"])
    def test_a_device_that_is_none(
        self, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--device bogus cannot be used" in refused(capsys, command, "--device", "bogus")
        assert "--device meta cannot be used" in refused(capsys, command, "--device", "meta")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "there is no CUDA device here" in refused(capsys, command, "--device", "cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert "the last CUDA device here is cuda:1" in refused(capsys, command, "--device", "cuda:2")

    def test_a_case_that_is_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--case nosuch: no case has that" in refused(capsys, "check", "--device", "cpu", "--case", "nosuch")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--rounds", "0"),
            ("--rounds", "1.5"),
            ("--jobs", "0"),
            ("--block", "nan"),
            ("--block", "0"),
            ("--block", "inf"),
            ("--block", "x"),
            ("--limit", "-1"),
            *(("--shape", shape) for shape in ("v5", "1,2,3", "4,16,2,16,17", "0,16,2,16,8", "a,b,c,d,e")),
        ],
    )
    def test_numbers_that_are_none(self, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        sentence = refused(capsys, "bench", option, value)
        assert f"argument {option}: " in sentence
        assert value in sentence

    def test_a_source_that_cannot_be_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for path in (tmp_path, tmp_path / "missing.json"):
            assert f"--from {path} cannot be read" in refused(capsys, "bench", "--from", str(path))

    @pytest.mark.parametrize(
        "content",
        [
            b'{"rows": [',
            b"\xff\xfe",
            b"[]",
            b"{}",
            json.dumps(RESULT | {"rows": [{"name": "x"}]}).encode(),
            json.dumps(RESULT | {"rows": [ROW | {"direction": "up"}]}).encode(),
            json.dumps(RESULT | {"rows": [ROW | {"ms": "fast"}]}).encode(),
            json.dumps(RESULT | {"rows": [ROW | {"kind": "friend"}]}).encode(),
            json.dumps(RESULT | {"rows": [ROW | {"tflops": "1"}]}).encode(),
            b"[" * 100_000,
            json.dumps(RESULT | {"machine": None}).encode(),
            json.dumps(RESULT | {"machine": {"devices": ["GPU"]}}).encode(),
        ],
    )
    def test_a_source_that_no_bench_wrote(
        self, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "foreign.json"
        path.write_bytes(content)
        assert f"--from {path} is not what" in refused(capsys, "bench", "--from", str(path), "--markdown")

    def test_a_source_with_no_rows_or_to_be_written_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(RESULT | {"rows": []}))
        assert f"--from {path} holds no rows" in refused(capsys, "bench", "--from", str(path))
        path.write_text(json.dumps(RESULT))
        copy = tmp_path / "copy.json"
        assert "--from measures nothing" in refused(capsys, "bench", "--from", str(path), "--json", str(copy))
        assert not copy.exists()
        assert cli.main(["bench", "--from", str(path)]) == 0
        assert "was not measured" in capsys.readouterr().out


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("content")
    for path in (old, new):
        edge.check_writable("--json", str(path))
    assert (old.read_text(), new.exists()) == ("content", False)


class TestOutput:
    """In new interpreters: what stands between a command and its reader is the process's own stdout."""

    def doctor(self, stdout: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "slattn", "doctor"]
        return subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False, env=environment
        )

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_reader_that_has_gone_is_no_error(self, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
        read, write = os.pipe()
        os.close(read)
        done = self.doctor(write)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
    def test_a_full_disk_is_a_sentence(self) -> None:
        with open("/dev/full", "w") as full:
            done = self.doctor(full)
        assert done.returncode == 1
        assert done.stderr == "slattn doctor: what it has to say cannot be written: No space left on device\n"


def test_tilelang_is_silenced_though_it_sets_its_level_as_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("tilelang")
    monkeypatch.setattr(logger, "level", logger.level)

    def load(name: str) -> types.ModuleType:
        logger.setLevel(logging.INFO)
        return types.ModuleType(name)

    monkeypatch.setattr(edge.importlib, "import_module", load)
    edge.quiet_tilelang()
    assert not logging.getLogger("tilelang.jit").isEnabledFor(logging.WARNING)
    assert logging.getLogger("tilelang.jit").isEnabledFor(logging.ERROR)


def test_a_bar_where_there_is_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.0)
    with progress.Progress(1) as bar:
        bar.step("done")


class TestAhead:
    def test_each_kernel_once(self) -> None:
        jobs = ahead.own_jobs([(64, 512, {}), (128, 512, {}), (16, 512, {"grad_lse": True}), (8, 96, {})], (9, 0))
        assert [function for function, _ in jobs] == [ahead.compile_own] * 8
        assert {arguments[0] for _, arguments in jobs} == {
            config.PrepareConfig(90),
            *(config.forward_config(90, heads, 512) for heads in (64, 16)),
            *(config.backward_config(90, heads, 512, grad_lse=heads == 16) for heads in (64, 16)),
            *(config.CompactConfig(), config.FinishConfig("bfloat16"), config.FinishConfig("float32")),
        }
        assert ahead.own_jobs([(64, 512, {})], (7, 5)) == []

    def test_a_bench_compiles_what_it_measures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernels of both modes, where both are measured: nobody compiles between two measurements."""
        begun: list[Any] = []

        def submit(pool: Any, jobs: Any) -> list[Any]:
            begun.extend(arguments[0] for _, arguments in jobs)
            return []

        monkeypatch.setattr(ahead, "submit", submit)
        monkeypatch.setattr(ahead, "processes", lambda count: contextlib.nullcontext())
        monkeypatch.setattr(bench, "gate", lambda *_: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        shapes = [testing.BENCH_SHAPES["v32"]]
        for deterministic in (False, True):
            args = argparse.Namespace(jobs=2, no_peers=True, seed=0, deterministic=deterministic)
            assert bench._ready(["tilelang"], shapes, ("bwd",), torch.device("cuda"), args)
            both = {mode for mode in (False, True) if config.backward_config(90, 128, 576, deterministic=mode) in begun}
            assert both == {False, deterministic}

    def test_a_peer_is_called_once_for_each_shape(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[Any] = []

        def maker(pass_: str) -> Any:
            return lambda inputs: lambda: called.append((pass_, inputs.q.shape))

        made = [
            peers.Peer("some TileLang", lambda: None, maker("fwd"), maker("bwd")),
            peers.Peer("absent TileLang", lambda: "no module", maker("fwd"), maker("bwd")),
            peers.Peer("other", lambda: None, maker("fwd"), maker("bwd")),
        ]
        monkeypatch.setattr(ahead, "PEERS", made)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        shapes = [testing.Shape("a", 4, 16, 2, 16, 8), testing.Shape("b", 5, 16, 2, 16, 8)]
        jobs = ahead.peer_jobs(shapes, ("fwd", "bwd"), torch.device("cpu"), 0)
        for function, arguments in jobs:
            function(*arguments)
        assert called == [(pass_, (size, 2, 16)) for size in (4, 5) for pass_ in ("fwd", "bwd")]
        called.clear()
        ahead.call_peer("some TileLang", shapes[0], ("bwd",), "cpu", 0)
        assert called == [("bwd", (4, 2, 16))]

    def test_what_fails_in_a_process_is_left_to_the_measurement(self) -> None:
        reports: list[None] = []
        with ahead.processes(1) as pool:
            futures = ahead.submit(pool, [(ahead.call_peer, ("nobody", None, (), "cpu", 0)), (os._exit, (1,))])
            ahead.wait(futures, lambda: reports.append(None))
        assert len(reports) == 2

    def test_the_gate_runs_behind_the_own_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a machine that says it has a Hopper: in which order what is compiled and run."""
        order: list[str] = []

        class Pool:
            def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

            def submit(self, function: Any, *arguments: Any) -> Future[None]:
                order.append(function.__name__)
                future: Future[None] = Future()
                future.set_result(None)
                return future

            def shutdown(self, **keywords: Any) -> None:
                order.append("shutdown")

        monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(ahead, "PEERS", [peers.Peer("TileLang", lambda: None, None, None)])
        monkeypatch.setattr(bench, "gate", lambda *arguments: order.append("gate") is None)
        arguments = cli_arguments("--jobs", "4")
        shapes = list(testing.BENCH_SHAPES.values())
        assert bench._ready(["tilelang"], shapes, ("fwd", "bwd"), torch.device("cuda"), arguments)
        own = order.count("compile_own")
        assert own >= 5
        assert order == ["compile_own"] * own + ["call_peer"] * len(shapes) + ["gate", "shutdown"]
        order.clear()
        assert bench._ready(["tilelang"], shapes, ("fwd",), torch.device("cuda"), cli_arguments("--jobs", "1"))
        assert order == ["gate"]

    def test_a_kernel_compiled_there_is_on_disk(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("tilelang", reason="TileLang is not installed: pip install tilelang==0.1.15")
        if find_nvcc() is None:
            pytest.skip("needs nvcc")
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
        with ahead.processes(1) as pool:
            (future,) = ahead.submit(pool, [(ahead.compile_own, (config.PrepareConfig(90),))])
            ahead.wait([future], lambda: None)
        assert future.exception() is None
        assert [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".cu", ".cubin")]


def cli_arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(options)
