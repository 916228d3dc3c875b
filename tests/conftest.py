"""What every test gets: a seed of its own, poisoned memory, the rule about GPU tests; how random calls are told."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

# The tests' matrices are small: on a busy machine threads wait for one another longer than they compute (7 times).
torch.set_num_threads(1)

PROMISED_GPUS = int(os.environ.get("SLATTN_REQUIRE_GPU") or 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU, or gpu(2) two, where there are fewer; fail where SLATTN_REQUIRE_GPU promises as many."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed, there = (*marker.args, 1)[0], torch.cuda.device_count()
    if there < min(needed, PROMISED_GPUS):
        pytest.fail(f"SLATTN_REQUIRE_GPU={PROMISED_GPUS}, but torch sees {there} CUDA devices")
    if there < needed:
        pytest.skip(f"needs {'an NVIDIA GPU' if needed == 1 else f'{needed} NVIDIA GPUs'}")


def pytest_configure() -> None:
    """One seed of random calls for all processes of a run: those of xdist have its environment."""
    os.environ.setdefault("SLATTN_SEED", str(random.SystemRandom().randrange(2**32)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many random calls the tests made, of which backend, and how near to a budget the nearest came."""
    told: dict[str, dict[str, Any]] = {}
    failed = 0
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, part in getattr(report, "user_properties", []):
                if name == "random calls" and report.when == "call":
                    failed += outcome == "failed"
                    backend = told.setdefault(part.get("name", "?"), {"calls": 0, "shares": {}})
                    backend["calls"] += part["calls"]
                    for tensor, share in part["shares"].items():
                        backend["shares"][tensor] = max(share, backend["shares"].get(tensor, 0.0))
    if not told:
        return
    calls = sum(backend["calls"] for backend in told.values())
    terminalreporter.section("random calls")
    for name, backend in told.items():
        shares = ", ".join(f"{tensor} {share:.2f}" for tensor, share in backend["shares"].items())
        terminalreporter.line(f"{backend['calls']:7,} {name}; of a budget at most: {shares}")
    terminalreporter.line(f"{calls:7,} in all, SLATTN_SEED={os.environ['SLATTN_SEED']}; {failed} tests of them failed")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill with NaN, or a large integer, what slattn allocates uninitialised: an element never written shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("slattn"):
            poison(tensor)
        return tensor

    return poisoned


def poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
