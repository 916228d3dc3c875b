"""docs/training_comparison.py at test size: what it says of equal runs, and of runs that are not."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slattn import backends, reference
from slattn.demo import data, model
from test_demo import SMALL, train

SCRIPT = Path(__file__).parents[1] / "docs" / "training_comparison.py"


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("training_comparison", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    corpus = data.split("".join(data.load().decode(data.load().train[:20_000])))
    monkeypatch.setattr(data, "load", lambda: corpus)
    monkeypatch.setattr(script, "Config", functools.partial(model.Config, **SMALL))
    monkeypatch.setattr(script, "EVERY", 3)
    monkeypatch.setattr(train, "HELD_OUT_WINDOWS", 4)
    return script


def compare(comparison: Any, out: Path, **changes: object) -> dict[str, Any]:
    """The report of all runs, one after another in this process."""
    settings = {"steps": 6, "seed": 0, "backend": "reference", "device": "cpu", "heads": 2, "head_dim": 64}
    options = argparse.Namespace(**settings | {"out": out, "seconds": 1e9} | changes)
    report = comparison.compared(options, {name: comparison.train(options, name) for name in comparison.RUNS})
    assert not torch.are_deterministic_algorithms_enabled()
    return report


def test_equal_runs_pass(comparison: Any, tmp_path: Path):
    report = compare(comparison, tmp_path)
    assert report["passed"]
    assert report["apart"]["backend"] == report["apart"]["deterministic"] == 0.0 < report["apart"]["nudged"]
    assert [each["step"] for each in report["gradients"]] == [0, 3, 5]
    assert all(each["all"] == 0.0 < min(each["nudged"], each["norm"]) for each in report["gradients"])
    assert "the same bits" in comparison.summary(report)
    assert comparison.summary(report).endswith("Passed: all finite.")


def with_backward(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A backend "wrong", whose dkv is changed."""
    true_backward, true_load = reference.backward, backends.load
    monkeypatch.setitem(backends.MODULES, "wrong", "")

    def backward(*arguments: Any, **keywords: Any) -> Any:
        dq, dkv, dsink = true_backward(*arguments, **keywords)
        return dq, None if dkv is None else change(dkv), dsink

    wrong = types.SimpleNamespace(**{**vars(reference), "backward": backward})
    monkeypatch.setattr(backends, "load", lambda name: wrong if name == "wrong" else true_load(name))


def test_a_wrong_gradient_fails(comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One backend's dkv is three quarters of what it should be."""
    with_backward(monkeypatch, lambda dkv: dkv * 0.75)
    report = compare(comparison, tmp_path, backend="wrong")
    assert not report["passed"]
    assert max(each["worst"] for each in report["gradients"]) > 0.1
    assert not report["differ"]


def test_gradients_that_differ_from_run_to_run_fail(comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    with_backward(monkeypatch, lambda dkv: dkv * (1 + 1e-6 * torch.randn(dkv.shape, generator=generator)))
    report = compare(comparison, tmp_path, backend="wrong")
    assert not report["passed"]
    assert report["differ"]


def test_a_resumed_run_that_forgets_fails(comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The optimizer's state is not restored."""
    true_restore = train.Trainer.restore

    def restore(run: Any) -> None:
        true_restore(run)
        run.optimizer.state.clear()

    monkeypatch.setattr(train.Trainer, "restore", restore)
    report = compare(comparison, tmp_path)
    assert report["differ"]
    assert not report["passed"]


@pytest.mark.parametrize("run", ["backend", "deterministic"])
def test_losses_far_from_the_references_fail(
    comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
):
    """Further than twice what rounding does."""
    true_train = comparison.train

    def train_elsewhere(options: argparse.Namespace, name: str) -> dict[str, Any]:
        trained = true_train(options, name)
        if name == run or (run, name) == ("deterministic", "resumed"):
            trained["losses"] = [loss + 0.5 for loss in trained["losses"]]
        return trained

    monkeypatch.setattr(comparison, "train", train_elsewhere)
    report = compare(comparison, tmp_path)
    assert report["apart"][run] == pytest.approx(0.5)
    assert not report["differ"]
    assert not report["passed"]


def test_a_run_cut_short_is_told(comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count()
    monkeypatch.setattr(comparison.time, "monotonic", lambda: next(clock))
    report = compare(comparison, tmp_path, steps=50, seconds=4)
    assert 0 < report["steps"] < 50
    assert not report["passed"]
    assert comparison.summary(report).endswith("CUT SHORT.")


def test_a_loss_that_is_not_finite_is_far_away(comparison: Any):
    assert not comparison.distance([1.0, float("nan")], [1.0, 1.0]) <= 1e9
    assert comparison.distance([1.0, 2.0, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.5**0.5)


def test_the_command_trains_in_processes_and_its_figures_are_drawn_elsewhere(tmp_path: Path):
    def run(*arguments: object) -> str:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    once, again = tmp_path / "once", tmp_path / "again"
    said = run("--steps", 2, "--device", "cpu", "--backend", "reference", "--jobs", 2, "--out", once)
    assert "the same bits" in said
    assert run("--from", once / "training.json", "--out", again) == said
    assert (again / "training.png").stat().st_size > 10_000
