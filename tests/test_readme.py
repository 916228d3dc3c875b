"""What README.md promises: its example runs as it stands, and the files that it names are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slattn import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "" for those that name none."""
    fenced = README.split("```")[1::2]
    return [block.partition("\n")[2] for block in fenced if block.partition("\n")[0] == language]


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line]) <= 12
    file = tmp_path / "example.py"
    file.write_text(example)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([64, 16, 512])" in done.stdout


def test_the_example_of_many_processes_runs(tmp_path: Path) -> None:
    (example,) = blocks("py")
    file = tmp_path / "example.py"
    file.write_text(example + "print(out.shape)\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False, env=hidden)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([64, 16, 512])") == 2


def test_the_first_line_names_the_debian_packages() -> None:
    first = README.splitlines()[0]
    assert all(package in first for package in ("make", "git", "python3-venv", "g++"))


def test_the_tree_names_what_is_there() -> None:
    tree = next(block for block in blocks("") if block.startswith("CHANGELOG.md"))
    folder = ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0]
        base = folder if line.startswith(" ") else ROOT
        for name in names.split(", "):
            assert (base / name).exists(), line
        if not line.startswith(" ") and names.endswith("/"):
            folder = ROOT / names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
        assert "://" in target or (ROOT / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_targets_and_commands_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, flags=re.MULTILINE):
        name = "".join(target)
        assert re.search(rf"^{name}:", MAKEFILE, flags=re.MULTILINE), name
    for command in re.findall(r"^slattn ([a-z]+)|`slattn ([a-z]+)", text, flags=re.MULTILINE):
        assert "".join(command) in cli.COMMANDS
