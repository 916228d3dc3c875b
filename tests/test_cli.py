"""The command line: what each command prints and returns, how the bench measures, how peers are called."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slattn import backends, cli, peers, testing
from slattn.commands import bench, check, doctor, timing
from slattn.commands.progress import Progress
from slattn.kernels import nvcc

TINY = "4,16,2,16,8"


def run(*argv: str) -> int:
    return cli.main(argv)


def fresh(*argv: str) -> subprocess.CompletedProcess[str]:
    """In a new interpreter that sees no GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


class TestCommandLine:
    def test_help_names_every_command(self) -> None:
        done = fresh("-m", "slattn", "--help")
        assert done.returncode == 0
        assert all(name in done.stdout for name in cli.COMMANDS)

    def test_no_command_and_an_unknown_one_are_errors(self, capsys: pytest.CaptureFixture[str]) -> None:
        for argv in ((), ("nothing",)):
            with pytest.raises(SystemExit) as stop:
                run(*argv)
            assert stop.value.code == 2
        assert "which command?" in capsys.readouterr().err

    def test_doctor_loads_no_other_command_and_nothing_heavy(self) -> None:
        program = (
            "import sys; from slattn.cli import main; main(['doctor']);"
            "heavy = {'tilelang', 'matplotlib', 'cudnn', 'slattn.demo', 'slattn.commands.bench'};"
            "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
        )
        done = fresh("-c", program)
        assert done.returncode == 0, done.stderr

    def test_interruption(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(args: Any) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "main", interrupted)
        assert run("doctor") == 130


class TestDoctor:
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("doctor", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["torch"] == torch.__version__
        assert set(report["backends"]) == set(backends.MODULES)
        assert all(state["runs"] or state["why_not"] for state in report["backends"].values())
        assert report["backends"]["reference"]["runs"]

    def test_a_probe_that_raises_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken() -> str:
            raise OSError("no such toolkit\nsecond line")

        monkeypatch.setattr(doctor, "find_nvcc", broken)
        monkeypatch.setattr(backends, "load", lambda name: broken())
        assert run("doctor") == 0
        text = capsys.readouterr().out
        assert "unknown (OSError: no such toolkit)" in text
        assert "it does not load: OSError: no such toolkit" in text

    def test_says_what_mends(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(doctor, "_importable", lambda module: False)
        refusing = type("Refusing", (), {"refusal": staticmethod(lambda problem: "it is not there")})
        monkeypatch.setattr(backends, "load", lambda name: refusing)
        assert run("doctor") == 0
        text = capsys.readouterr().out
        for package in ("tilelang==", "nvidia-cudnn-frontend==", "sglang-kernel=="):
            assert f"pip install {package}" in text

    def test_says_all_that_the_kernels_need(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """In one line, TileLang there or not: a user who has done it is ready."""
        monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
        monkeypatch.setattr(doctor, "find_cxx", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(doctor, "_importable", lambda module: False)
        assert run("doctor") == 0
        lines = capsys.readouterr().out.splitlines()
        (at,) = (i for i, line in enumerate(lines) if line.startswith("backend tilelang"))
        assert "it needs an NVIDIA GPU, and torch finds none here" in lines[at]
        for command in ("pip install tilelang==", "pip install nvidia-cuda-nvcc==", "apt-get install g++"):
            assert command in lines[at + 1]


class TestCheck:
    def test_reference_on_a_cpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("check", "--device", "cpu", "--backend", "reference", "--case", "keys-", "--seed", "3") == 0
        text = capsys.readouterr().out
        assert "ran on cpu: reference; reference, in float32" in text
        assert "0 over budget or failed" in text

    def test_verbose_has_a_line_for_each_tensor(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("check", "--device", "cpu", "--backend", "reference", "--case", "batch-3-one-key-each")
        assert run(*arguments, "--verbose") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if "batch-3-one" in line] == list(testing.BUDGETS) * 2

    def test_over_budget_is_red(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(testing, "relative_error", lambda got, want: 0.5)
        assert run("check", "--device", "cpu", "--backend", "reference", "--case", "keys-31") == 1
        assert "FAILED" in capsys.readouterr().out

    def test_a_crash_is_red_and_the_others_still_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        cases = testing.CASES[:2]

        def crashing(case: testing.Case, seed: int) -> list[testing.Row]:
            if case is cases[0]:
                raise RuntimeError("launch failed")
            return [testing.Row(case.name, "out", 1e-3, 2e-3, True)]

        report = check.run_cases("crashing", crashing, cases, 0)
        assert report.failures == 1
        assert len(report.rows) == 1
        text = check.text(report, verbose=False)
        assert "FAILED 1" in text
        assert "launch failed" in text

    def test_a_named_backend_that_runs_nothing_is_red(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("check", "--device", "cpu", "--backend", "tilelang", "--case", "keys-") == 1
        text = capsys.readouterr().out
        assert "refused" in text
        assert "ran on cpu: none" in text


@pytest.fixture
def small_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GATE", ("H8-D128-T16-N20-K16",))


@pytest.mark.usefixtures("small_gate")
class TestBench:
    ARGUMENTS = ("bench", "--device", "cpu", "--quick", "--shape", TINY)

    def test_rows(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert run(*self.ARGUMENTS, "--shape", "5,9,1,8,3", "--json", "-") == 0
        *_, last = capsys.readouterr().out.strip().splitlines()
        result = json.loads(last)
        rows = {(row["shape"], row["direction"], row["name"]): row for row in result["rows"]}
        for shape in (TINY, "5,9,1,8,3"):
            for pass_ in ("fwd", "bwd"):
                assert rows[shape, pass_, "reference"]["ms"] > 0
                assert rows[shape, pass_, "reference"]["burst_ms"] > 0
                assert "refuses" in rows[shape, pass_, "tilelang"]["note"]
        flops = testing.Shape("", 4, 16, 2, 16, 8).backward_flops
        row = rows[TINY, "bwd", "reference"]
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)

    def test_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        written, drawn = tmp_path / "rows.json", tmp_path / "rows.png"
        assert run(*self.ARGUMENTS, "--pass", "fwd", "--json", str(written), "--plot", str(drawn)) == 0
        assert {row["direction"] for row in json.loads(written.read_text())["rows"]} == {"fwd"}
        assert drawn.read_bytes()[:4] == b"\x89PNG"
        drawn.unlink()
        measured = capsys.readouterr().out
        assert run("bench", "--from", str(written), "--plot", str(drawn), "--markdown") == 0
        shown = capsys.readouterr().out
        assert measured.strip() in shown
        assert f"| {TINY}, forward |" in shown
        assert drawn.exists()

    def test_no_speed_when_the_check_is_red(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(testing, "relative_error", lambda got, want: 0.5)
        assert run(*self.ARGUMENTS) == 1
        text = capsys.readouterr().out
        assert "no speed is printed" in text
        assert "TFLOPS" not in text

    def test_the_gate_names_cases(self) -> None:
        assert set(bench.GATE) <= {case.name for case in testing.CASES}

    def test_inputs_that_do_not_fit_give_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any) -> testing.Inputs:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(testing, "bench_inputs", full)
        shape = bench.parse_shape(TINY)
        rows = bench.bench_group(shape, "fwd", ["reference"], torch.device("cpu"), _arguments(), Progress(1))
        assert [row.note for row in rows] == ["out of memory"]
        assert "out of memory" in bench.table(rows)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_gate")
class TestOnGpu:
    def test_check(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("check", "--backend", "tilelang", "--case", "sink-mixed") == 0
        assert "0 over budget or failed" in capsys.readouterr().out

    def test_bench(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("bench", "--quick", "--shape", "256,1024,64,512,128", "--json", "-") == 0
        *_, last = capsys.readouterr().out.strip().splitlines()
        rows = {(row["direction"], row["name"]): row for row in json.loads(last)["rows"]}
        for pass_ in ("fwd", "bwd"):
            assert rows[pass_, "tilelang"]["tflops"] > 0
            assert rows[pass_, "matmul 8192"]["tflops"] > 0
            assert all(row["ms"] or row["note"] for row in rows.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([])


def test_rates_and_ratios() -> None:
    contestants = [
        timing.Contestant("matmul", "matmul", None, sustained=[1.0], burst=[0.5]),
        timing.Contestant("ours", "backend", None, sustained=[2.0, 8.0, 4.0], burst=[2.0]),
        timing.Contestant("fast", "peer", None, sustained=[5.0], burst=[5.0]),
        timing.Contestant("slow", "peer", None, sustained=[50.0], burst=[50.0]),
        timing.Contestant("absent", "peer", None, note="cannot be imported"),
    ]
    matmul, ours, fast, slow, absent = bench._rows("s", "fwd", 2 * 10**12, 10**12, contestants)
    assert (matmul.tflops, matmul.of_best_peer) == (1000, None)
    assert (ours.ms, ours.tflops, ours.burst_tflops) == (4.0, 500, 1000)
    assert (ours.of_matmul, ours.of_best_peer) == (0.5, 1.25)
    assert (fast.of_best_peer, slow.of_best_peer) == (1.0, 0.1)
    assert (absent.ms, absent.tflops, absent.note) == (None, None, "cannot be imported")


class Virtual(timing.Clock):
    """A clock that stands still but for what the calls of a test add to `now`, in seconds."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0

    def mark(self) -> float:
        return self.now


class TestTiming:
    def test_blocks_alternate_and_last(self) -> None:
        clock, calls = Virtual(), []

        def named(name: str) -> Callable[[], None]:
            def call() -> None:
                calls.append(name)
                clock.now += 0.002

            return call

        contestants = [timing.Contestant(name, "backend", named(name)) for name in "ab"]
        timing.warm_up(contestants, clock, limit=1.0)
        assert "".join(calls) == "aaaabbbb"
        calls.clear()
        timing.measure(contestants, clock, block=0.03, rounds=2)
        blocks = [list(group) for _, group in itertools.groupby(calls)]
        assert [block[0] for block in blocks] == list("abab" * 2)  # two rounds sustained, two of bursts
        assert [len(block) for block in blocks] == [15] * 4 + [timing.BURST_CALLS] * 4
        for contestant in contestants:
            assert contestant.sustained == pytest.approx([2.0, 2.0])
            assert contestant.burst == pytest.approx([2.0, 2.0])

    def test_the_first_fifth_is_not_counted(self) -> None:
        clock, calls = Virtual(), itertools.count(1)

        def slow_at_first() -> None:
            clock.now += 0.02 if next(calls) <= 2 else 0.001

        contestant = timing.Contestant("c", "backend", slow_at_first, estimate=2.0)
        timing.measure([contestant], clock, block=0.02, rounds=1)  # ten calls by the estimate, two not counted
        assert contestant.sustained == pytest.approx([1.0])

    def test_a_block_that_was_too_short_is_run_again(self) -> None:
        clock, calls = Virtual(), itertools.count()

        def call() -> None:
            next(calls)
            clock.now += 0.001

        contestant = timing.Contestant("c", "backend", call, estimate=50.0)
        timing._block(contestant, call, clock, block=0.1)
        assert next(calls) == 5 + 100

    def test_failures_and_slow_calls_become_notes(self) -> None:
        clock, calls = Virtual(), itertools.count(1)

        def full() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        def slow() -> None:
            clock.now += 0.05

        def late() -> None:
            clock.now += 0.001
            if next(calls) > 8:
                raise ValueError("went wrong\nlater")

        contestants = [timing.Contestant(call.__name__, "peer", call) for call in (full, slow, late)]
        timing.warm_up(contestants, clock, limit=0.02)
        timing.measure(contestants, clock, block=0.01, rounds=1)
        notes = [contestant.note or "" for contestant in contestants]
        assert notes[0] == "out of memory"
        assert "over the limit" in notes[1]
        assert notes[2] == "ValueError: went wrong"
        assert all(contestant.ms is None for contestant in contestants)


class TestPeers:
    """Each peer gets what its interface asks for: shapes, dtypes and keywords, seen by a stand-in."""

    inputs = testing.bench_inputs(testing.Shape("", 4, 130, 64, 64, 128), "cpu")

    def test_flashmla(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict[str, Any] = {}

        def forward(q: Any, kv: Any, indices: Any, sm_scale: float, **keywords: Any) -> str:
            seen.update(q=q, kv=kv, indices=indices, sm_scale=sm_scale, **keywords)
            return "out"

        monkeypatch.setattr(peers, "_flashmla", lambda: forward)
        assert peers._flashmla_forward(self.inputs)() == "out"
        assert (seen["kv"].shape, seen["indices"].shape) == ((130, 1, 64), (4, 1, 128))
        assert (seen["indices"].dtype, seen["sm_scale"], seen["d_v"]) == (torch.int32, 0.125, 512)
        assert (seen["attn_sink"].shape, seen["attn_sink"].dtype) == ((64,), torch.float32)

    def test_flashmla_refuses(self) -> None:
        with pytest.raises(peers.Unsuitable, match="64 or 128 heads"):
            peers._flashmla_forward(testing.bench_inputs(testing.Shape("", 2, 130, 16, 64, 128), "cpu"))

    def test_cudnn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []

        def wrapper(*arguments: Any, **keywords: Any) -> str:
            seen.extend((*arguments, keywords))
            return "gradients"

        monkeypatch.setattr(peers, "_cudnn_backward_wrapper", lambda: wrapper)
        assert peers._cudnn_backward(self.inputs)() == "gradients"
        q, kv, out, dout, lse, sink, indices, keywords = seen
        assert (q.shape, kv.shape, indices.shape) == ((4, 64, 64), (130, 64), (4, 128))
        assert (out.shape, dout.shape, lse.shape, lse.dtype) == (q.shape, q.shape, (4, 64), torch.float32)
        assert (sink.dtype, keywords) == (torch.float32, {"softmax_scale": 0.125})
        want = testing.oracle(self.inputs)
        assert testing.relative_error(lse, want.lse) < 1e-6  # natural, keys only

    def test_no_sink_is_minus_infinity(self) -> None:
        assert bool((peers._sink(replace(self.inputs, attn_sink=None)) == -torch.inf).all())

    def test_automodel_wants_a_power_of_two_or_576(self) -> None:
        odd = testing.bench_inputs(testing.Shape("", 2, 130, 16, 96, 64), "cpu")
        with pytest.raises(peers.Unsuitable, match="power of two"):
            peers._automodel_forward(odd)

    def test_a_missing_peer_says_so(self) -> None:
        def absent() -> None:
            raise ImportError("No module named 'absent'\nmore")

        assert peers._missing(absent)() == "ImportError: No module named 'absent'"


class TestNvcc:
    def test_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def tool(folder: str) -> str:
            path = tmp_path / folder / "nvcc"
            path.parent.mkdir(parents=True)
            path.touch(mode=0o755)
            return str(path)

        on_path, in_home, by_pip = tool("path"), tool("home/bin"), tool("pip")
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setattr(nvcc, "_pip_nvcc", lambda: by_pip)
        assert nvcc.find_nvcc() == in_home
        monkeypatch.delenv("CUDA_HOME")
        assert nvcc.find_nvcc() == on_path
        monkeypatch.setenv("PATH", str(tmp_path))
        assert nvcc.find_nvcc() == by_pip

    def test_a_named_toolkit_is_the_only_one_tried(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert nvcc.find_nvcc() is None
