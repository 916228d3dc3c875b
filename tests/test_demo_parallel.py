"""The demo over two processes, under torchrun and gloo: the losses of one process, an interrupt, a resume, refusals.

This file is also what torchrun starts, with the demo's options: the command at test size.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slattn import cli
from slattn.commands.edge import UsageError

pytest.importorskip("slattn.demo.plot", exc_type=ImportError)
pytest.importorskip("slattn.demo.train", exc_type=ImportError)

from slattn.demo import data, model, parallel, train
from test_demo import SMALL

STEPS = 6
INTERRUPTED = "--interrupted"  # the second process alone hears of an interrupt, in its third step


def command(options: list[str]) -> int:
    """The demo with these options at test size, with random weights: fresh ones are zero where they hide most."""
    text = data.load()
    corpus = data.split(text.decode(text.train[:20_000]))
    changed = {"HELD_OUT_WINDOWS": 4, "SAMPLE": 8, "Config": functools.partial(model.Config, **SMALL)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda: corpus)
        patch.setattr(train.Trainer, "faster_threads", lambda trainer, most: most)
        patch.setattr(train, "Decoder", random_decoder)
        for name, value in changed.items():
            patch.setattr(train, name, value)
        return cli.main(["demo", "--device", "cpu", "--steps", str(STEPS), *options])


def random_decoder(config: model.Config, backend: str) -> model.Decoder:
    decoder = model.Decoder(config, backend)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
    return decoder


def interrupt() -> None:
    one_step = train.Trainer.one_step

    def interrupted_step(trainer: train.Trainer) -> None:
        if trainer.step == 2 and not trainer.leads:
            os.kill(os.getpid(), signal.SIGINT)
        one_step(trainer)

    train.Trainer.one_step = interrupted_step  # type: ignore[method-assign]


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    return subprocess.run([*launch, *options], capture_output=True, text=True, timeout=120, check=False)


def history(out: Path) -> dict[str, list]:
    return json.loads((out / "demo.json").read_text())["history"]


def test_two_processes_come_to_the_losses_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert command(["--out", str(one)]) == 0
    options = ["--context-parallel", "2", "--out", str(two)]
    broken = torchrun(*options, INTERRUPTED)
    assert broken.returncode != 0
    assert "Interrupted after step 3 of 6" in broken.stdout, broken.stderr
    assert [path.name for path in two.iterdir()] == ["checkpoint.pt"]
    resumed = torchrun(*options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert (
        resumed.stdout.count("Backend: reference") == resumed.stdout.count("Held-out loss") == 1
    )  # one of them speaks
    assert "in each of 2 processes" in resumed.stdout
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint.pt", "demo.json", "demo.png"]
    for name in ("train", "indexer", "held_out"):
        single, shared = (torch.tensor(history(out)[name]) for out in (one, two))
        assert len(single) >= STEPS
        torch.testing.assert_close(shared, single, rtol=0, atol=1e-4)
    assert json.loads((two / "demo.json").read_text())["context_parallel"] == 2


def test_checkpoint_of_one_process_is_another_run_s(tmp_path: Path) -> None:
    """Its losses are the same but for rounding; `--resume` promises more."""
    args = argparse.Namespace(steps=1, seed=0, backend="auto", out=tmp_path)
    corpus = data.split("".join(chr(97 + n * n % 23) for n in range(4000)))
    config = model.Config(vocabulary=len(corpus.characters), **SMALL)
    train.Trainer(config, corpus, args, torch.device("cpu")).save()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    state["settings"]["context_parallel"] = 2
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="is of another run: it has context_parallel 2, not 1"):
        train.Trainer(config, corpus, args, torch.device("cpu")).restore()


@pytest.mark.parametrize(
    ("ranks", "running", "sentence"),
    [
        (0, None, "--context-parallel must be at least 1; got 0"),
        (2, None, "needs 2 processes, and this run has 1: torchrun --nproc-per-node 2 -m slattn demo --context-par"),
        (2, 3, "--context-parallel 2 needs 2 processes, and this run has 3: torchrun"),
        (2, "", "needs 2 processes, and this run has 1"),  # LOCAL_RANK of something else than torchrun
        (1, 2, "torchrun started 2 processes: add --context-parallel 2"),
        (5, 5, "--context-parallel 5 does not divide a text's 12 blocks of 4 tokens"),
    ],
)
def test_refusals_are_sentences(monkeypatch, capsys, tmp_path, ranks, running, sentence) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if running is not None:
        monkeypatch.setenv("LOCAL_RANK", "0")
    if running:
        for name, value in (("RANK", 0), ("WORLD_SIZE", running)):
            monkeypatch.setenv(name, str(value))
    assert command(["--out", str(tmp_path), "--context-parallel", str(ranks)]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_device_of_another_kind_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="needs a CPU or CUDA; got --device meta"),
        parallel.joined(2, model.Config(vocabulary=3), torch.device("meta")),
    ):
        pass


if __name__ == "__main__":
    if INTERRUPTED in sys.argv:
        sys.argv.remove(INTERRUPTED)
        interrupt()
    sys.exit(command(sys.argv[1:]))
