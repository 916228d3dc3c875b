"""What commands do before they begin: options are checked while nothing has been spent, and other logs silenced."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import math
import os
from pathlib import Path

import torch


class UsageError(Exception):
    """Something was asked that cannot be done; the message is the sentence to show. Exit status 2."""


def default_device() -> str:
    """Cuda where there is a device, otherwise cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str | None) -> torch.device:
    """The device of --device, on which a number can be made and read.

    Raises:
        UsageError: there is no such device here.
    """
    name = name or default_device()
    try:
        found = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} cannot be used: a device is cpu, cuda, or one of several, cuda:1") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UsageError(f"--device {name} cannot be used: there is no CUDA device here (see `slattn doctor`)")
        if (found.index or 0) >= count:
            raise UsageError(f"--device {name} cannot be used: the last CUDA device here is cuda:{count - 1}")
    try:
        torch.ones(1, device=found).item()
    except Exception as error:  # each kind of device has its own
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"--device {name} cannot be used: {reason}") from None
    return found


def check_writable(option: str, path: str) -> None:
    """Raises UsageError where a file cannot be written to. Changes nothing."""
    fresh = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if fresh:
            os.unlink(path)
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written to: {error.strerror or error}") from None


def check_plot(option: str, path: str, otherwise: str = "") -> None:
    """Raises UsageError where a picture cannot be drawn or written: no matplotlib, a kind or a place that is none.

    `otherwise`: what can be done without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib: pip install matplotlib{otherwise}")
    kinds = (".png", ".pdf", ".svg")
    if Path(path).suffix.lower() not in kinds:
        raise UsageError(f"{option} {path}: the name must end in one of {', '.join(kinds)}")
    check_writable(option, path)


def seconds(argument: str) -> float:
    """The type of an option that takes a time."""
    value = float(argument)  # argparse makes a sentence of its ValueError
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got {argument}")
    return value


def count(argument: str) -> int:
    """The type of an option that takes a number from one up."""
    value = int(argument)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {argument}")
    return value


def seed(argument: str) -> int:
    """The type of an option that takes a seed of torch's generators."""
    value = int(argument)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2**63; got {argument}")
    return value


def quiet_tilelang() -> None:
    """Keep what TileLang logs out of stdout. It sets its level when it is imported, so that has to come first."""
    with contextlib.suppress(Exception):  # whoever needs it says what is wrong with it
        importlib.import_module("tilelang")
    logging.getLogger("tilelang").setLevel(logging.ERROR)
