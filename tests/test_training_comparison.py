"""docs/training_comparison.py at test size: what it says of equal runs, and of runs that are not."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import types
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


def options(out: Path, **changes: object) -> argparse.Namespace:
    settings = {"steps": 6, "seed": 0, "backend": "reference", "device": "cpu", "out": out, "head_dim": 64}
    return argparse.Namespace(**settings | changes)


def test_equal_runs_pass(comparison: Any, tmp_path: Path):
    report = comparison.compare(options(tmp_path))
    assert report["passed"]
    assert report["apart"]["backend"] == 0.0 < report["apart"]["nudged"]
    assert [each["step"] for each in report["gradients"]] == [0, 3, 5]
    assert all(each["all"] == 0.0 < min(each["nudged"], each["norm"]) for each in report["gradients"])
    json.dumps(report)
    comparison.draw(report, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert comparison.summary(report).endswith("Passed: all finite.")


def test_a_wrong_gradient_fails(comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One backend's dkv is three quarters of what it should be."""
    true_backward, true_load = reference.backward, backends.load
    monkeypatch.setitem(backends.MODULES, "wrong", "")

    def backward(*arguments: Any, **keywords: Any) -> Any:
        dq, dkv, dsink = true_backward(*arguments, **keywords)
        return dq, None if dkv is None else dkv * 0.75, dsink

    wrong = types.SimpleNamespace(**{**vars(reference), "backward": backward})
    monkeypatch.setattr(backends, "load", lambda name: wrong if name == "wrong" else true_load(name))
    report = comparison.compare(options(tmp_path, backend="wrong"))
    assert not report["passed"]
    assert max(each["worst"] for each in report["gradients"]) > 0.1


def test_a_loss_that_is_not_finite_is_far_away(comparison: Any):
    assert not comparison.distance([1.0, float("nan")], [1.0, 1.0]) <= 1e9
    assert comparison.distance([1.0, 2.0, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.5**0.5)


def test_two_runs_and_a_resumed_one(comparison: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    try:
        assert comparison.same_bits(options(tmp_path)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert "the same bits" in capsys.readouterr().out
