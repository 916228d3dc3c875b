"""`slattn scale`: the model against figures worked out by hand, and docs/scale.md against the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slattn.cli import main
from slattn.commands import edge
from slattn.commands.scale import GPUS, MODELS, TOKENS, Machine, collective, costs, table

DOCS = Path(__file__).parents[1] / "docs"


def test_one_gpu_is_the_bench() -> None:
    """4096 queries of v32: the measured rates give the measured times, and nothing travels."""
    cost = costs(MODELS["V3.2"], 4096, 1)
    assert cost.forward == pytest.approx(2 * 4096 * 2048 * 128 * (576 + 512) / 550e12)
    assert cost.backward == pytest.approx(2 * 4096 * 2048 * 128 * (3 * 576 + 2 * 512) / 417e12, rel=1e-3)
    assert cost.wire == cost.wire_bytes == 0
    q, kv, out = 4096 * 128 * 576 * 2, 4096 * 576 * 2, 4096 * 128 * 512 * 2
    assert cost.saved_bytes == q + kv + out + 4096 * (4 * 128 + 4 * 2048)
    assert cost.peak_bytes == cost.saved_bytes + q + out + 4096 * 576 * (2 + 4 + 4)


def test_collectives() -> None:
    machine = Machine(link=100e9, network=10e9, latency=0.0, hop=0.0)
    assert collective(8e9, 1, machine) == 0
    assert collective(8e9, 2, machine) == pytest.approx(0.04)  # half of it comes in
    assert collective(8e9, 8, machine) == pytest.approx(0.07)
    assert collective(8e9, 16, machine) == pytest.approx(max(8e9 * 15 / 16 / 100e9, 4e9 / 80e9))
    assert collective(8e9, 1024, machine) == pytest.approx(8e9 * 127 / 128 / 80e9)
    assert collective(0, 8, Machine(latency=1.0, hop=2.0)) == 7.0


def test_more_gpus_share_the_work_and_not_the_keys() -> None:
    few, many = costs(MODELS["GLM-5"], 2**20, 64), costs(MODELS["GLM-5"], 2**20, 256)
    assert few.forward == pytest.approx(4 * many.forward)
    assert many.reduce >= few.reduce
    assert few.peak_bytes / 4 < many.peak_bytes < few.peak_bytes


def test_a_table_beyond_the_cache_is_bound_by_memory() -> None:
    """GLM-5's rows at a million tokens: nearly every one comes from memory, and a sum goes there and back."""
    cost = costs(MODELS["GLM-5"], 2**20, 256)
    traffic = 4096 * 2048 * 576 * (2 + 8) / 4.25e12
    assert cost.backward == pytest.approx(traffic + 2**20 * 576 * 4 / 4.25e12, rel=0.02)


def test_the_document_has_the_table_of_the_model() -> None:
    assert table(list(MODELS.values()), TOKENS, GPUS) in (DOCS / "scale.md").read_text()


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["scale", "--model", "V3.2"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(table([MODELS["V3.2"]], TOKENS, GPUS))
    assert "links as assumed" in printed.partition("|")[0]
    assert main(["scale", "--model", "V3.2", "--tokens", "8192", "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["forward", "4.248", "ms"]
    assert lines[-1].startswith("peak")
    assert main(["scale", "--tokens", "1000", "--gpus", "16"]) == 2
    assert "--tokens must be a multiple of --gpus" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(edge.importlib.util, "find_spec", lambda name: None)
        assert main(["scale", "--plot", str(tmp_path / "scale.png")]) == 2
        assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main(["scale", "--plot", str(tmp_path)]) == 2
    assert "must end in one of .png" in capsys.readouterr().err
    assert main(["scale", "--plot", str(tmp_path / "scale.png")]) == 0
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_measure_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """The command at work; its figures say nothing."""
    assert main(["scale", "--measure"]) == 2
    assert "--measure needs two processes or more: torchrun" in capsys.readouterr().err
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["-m", "slattn", "scale", "--measure"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False, env=hidden)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks, ")
    for words in ("all_gather: ", "reduce_scatter: ", "agreement: ", "step: one ", "all, early ", "layer: plain "):
        assert any(words in line for line in lines), words
