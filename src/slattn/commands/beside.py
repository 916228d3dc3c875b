"""Another checkout of slattn in the same process, under a name of its own, so that `slattn bench` can race the two.

A GPU's clock follows what ran before, and cards differ: two versions compare in one run alone. The package is copied,
and what refers to it by name is rewritten: imports, and the namespace of its torch operators. The C++ namespace in its
kernels stays, so that kernels that are alike are one entry of TileLang's cache.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from slattn.commands.edge import UsageError


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="slattn-beside-")  # goes with the process
    sys.path.insert(0, directory.name)
    return directory


@functools.cache
def load(checkout: str) -> Any:
    """The package of a checkout, a directory that holds src/slattn, as slattn_ and the directory's name.

    Raises:
        UsageError: there is none; or it cannot be imported, with the reason.
    """
    package = Path(checkout) / "src" / "slattn"
    if not (package / "__init__.py").is_file():
        raise UsageError(f"--beside {checkout}: expected a checkout of slattn, and there is no {package}/__init__.py")
    name = "slattn_" + re.sub(r"\W", "_", Path(checkout).resolve().name)
    while (copy := Path(_directory().name) / name).exists():  # of another directory of that name
        name += "_"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        path.write_text(renamed(path.read_text(), name))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"--beside {checkout} cannot be imported: {type(error).__name__}: {error}") from None


def renamed(text: str, name: str) -> str:
    """A module's text, with the package under another name."""
    text = re.sub(r"\bslattn(?=\.[a-z_])", name, text)
    text = re.sub(r"^(\s*)import slattn$", rf"\1import {name} as slattn", text, flags=re.MULTILINE)
    text = re.sub(r"\bfrom slattn import\b", f"from {name} import", text)
    return re.sub(r'(Library\(\s*"|register_\w+\(\s*f?")slattn(?="|::)', rf"\1{name}", text)
