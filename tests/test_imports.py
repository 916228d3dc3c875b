"""Imports: what `import slattn` loads, and that arrows between modules run one way only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import slattn
from slattn.backends import MODULES

PACKAGE = Path(slattn.__file__).parent

# A module imports those of a lower number, or of its own package. `slattn` itself is what ops makes public.
LAYERS = {
    "slattn.problem": 0,
    "slattn.groups": 0,
    "slattn.reference": 1,
    "slattn.kernels": 1,
    "slattn.backends": 2,
    "slattn.selection": 3,
    "slattn.ops": 3,
    "slattn.indexer": 4,
    "slattn": 5,
    "slattn.distributed": 6,
    "slattn.testing_cases": 6,
    "slattn.automodel": 6,
    "slattn.frameworks": 7,
    "slattn.testing": 7,
    "slattn.peers": 8,
    "slattn.commands": 9,
    "slattn.demo": 10,
    "slattn.cli": 11,
    "slattn.__main__": 12,
}

LOADED = """
import importlib, json, sys
import torch
loaded = {}
for name in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(name)
    new = {module.partition(".")[0] for module in set(sys.modules) - before}
    loaded[name] = sorted(new - sys.stdlib_module_names - {"slattn", "torch"})
print(json.dumps(loaded))
"""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything in the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(path: Path, *, everywhere: bool = True) -> set[str]:
    """The modules that a file imports, as dotted names; with `everywhere` false, only when it is itself imported."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if everywhere else _outside_functions(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports inside the package are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = names & set(modules())
            found |= submodules if len(submodules) == len(names) else submodules | {str(node.module)}
    return found


def _outside_functions(tree: ast.AST) -> list[ast.AST]:
    nodes, queue = [], [tree]
    while queue:
        node = queue.pop()
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _only_for_types(node):
            queue.extend(ast.iter_child_nodes(node))
    return nodes


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def layer(name: str) -> str:
    """The entry of LAYERS that a module belongs to; "slattn" for one that stands in none."""
    while name not in LAYERS:
        name = name.rpartition(".")[0]
    return name


def test_every_module_has_a_layer():
    for name in modules():
        assert layer(name) != "slattn" or name == "slattn", f"{name}: say in LAYERS where it stands"


@pytest.mark.parametrize("name", modules())
def test_arrows_run_one_way(name: str):
    own = layer(name)
    for imported in imports(modules()[name]):
        if imported.partition(".")[0] != "slattn":
            continue
        other = layer(imported)
        assert other == own or LAYERS[other] < LAYERS[own], f"{name} imports {imported}"


def test_backends_do_not_import_each_other():
    for name in MODULES.values():
        others = imports(modules()[name]) & (set(MODULES.values()) - {name, "slattn.reference"})
        assert not others, f"{name} imports {others}"


@pytest.mark.parametrize("name", ["slattn.problem", "slattn.reference"])
def test_the_definition_needs_torch_alone(name: str):
    third_party = {x.partition(".")[0] for x in imports(modules()[name])} - sys.stdlib_module_names
    assert third_party <= {"torch", "slattn"}


def test_launch_configurations_can_be_read_without_tilelang():
    assert not any(x.startswith("tilelang") for x in imports(modules()["slattn.kernels.config"]))


def test_importing_loads_torch_and_nothing_heavier():
    """In a fresh interpreter, one module after another: no kernel library, no numpy, no plotting until it is used."""
    device_programs = {
        name
        for name, path in modules().items()
        if any(x.startswith("tilelang") for x in imports(path, everywhere=False))
    }
    assert all(name.startswith("slattn.kernels.") for name in device_programs), device_programs
    light = [
        name
        for name in modules()
        if name not in device_programs and not name.startswith("slattn.demo.") and name != "slattn.__main__"
    ]
    command = [sys.executable, "-c", LOADED, *light]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert loaded == {name: [] for name in light}
