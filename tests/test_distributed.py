"""Several processes against one: see distributed_worker.py, which each of them runs. gloo, on this machine's CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from distributed_worker import CHECKS, work
from slattn import distributed

MESH_OF_FOUR = {"both_on_a_mesh"}
GPUS_ALONE = {"with_the_kernels"}
SECONDS = 240  # on a machine where other tests run; alone it takes 20


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_processes_do_what_one_does(ranks: int, tmp_path: Path) -> None:
    """All checks in one start of the processes, which costs more than they do."""
    run(ranks, tmp_path, [name for name in names(ranks) if name not in GPUS_ALONE])


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.gpu(ranks)) for ranks in (2, 4)])
def test_many_gpus_do_what_one_does(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with NCCL for the tensors and gloo for the exchange; and with the kernels, which take no float64."""
    monkeypatch.setenv("SLATTN_TEST_DEVICE", "cuda")
    run(ranks, tmp_path, names(ranks))


def names(ranks: int) -> list[str]:
    return [name for name in CHECKS if ranks == 4 or name not in MESH_OF_FOUR]


def run(ranks: int, folder: Path, names: list[str]) -> None:
    """Start the processes, wait for them, and fail with what failed in any."""
    context = mp.spawn(work, (ranks, str(folder), names), nprocs=ranks, join=False)
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()
    failures = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    text = [
        f"{name} on rank {rank}:\n{trace}" for rank, failed in enumerate(failures) for name, trace in failed.items()
    ]
    assert not text, "\n".join(text)


def test_without_a_process_group() -> None:
    q, kv, indices = torch.randn(2, 1, 4), torch.randn(3, 4), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="is not initialised: call"):
        distributed.sparse_attention(q, kv, indices)
