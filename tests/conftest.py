"""What every test gets: a seed of its own, poisoned fresh memory, and the rule about GPU tests."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

# The tests' matrices are small: on a busy machine threads wait for one another longer than they compute (7 times).
torch.set_num_threads(1)

REQUIRE_GPU = os.environ.get("SLATTN_REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none; fail it where SLATTN_REQUIRE_GPU=1 promises one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if REQUIRE_GPU:
            pytest.fail("SLATTN_REQUIRE_GPU=1, but torch sees no CUDA device")
        pytest.skip("needs an NVIDIA GPU")


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
