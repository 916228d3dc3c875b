"""How the demo writes: files whole or not at all, and to a terminal whatever letters that has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where a file stands until it is whole."""
    return path.with_name(path.name + ".part")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write so that `path` is written whole or not at all: who reads it finds the old one or the new."""
    part = part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def say(text: str) -> None:
    """Print it, with ? for what stdout's encoding has no letter for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # no stdout: print says nothing
    print(text.encode(encoding, "replace").decode(encoding))
