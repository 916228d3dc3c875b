"""What every adapter in slattn.frameworks has in common: a handle that says, undoes and refuses."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slattn
from slattn.frameworks.handle import Patch

FOLDER = Path(slattn.__file__).parent / "frameworks"
# Adapter -> the module that its framework keeps the replaced names in, and the version or words of its refusal.
ADAPTERS = {
    "nemo_automodel": ("nemo_automodel.components.models.deepseek_v4.optimized_kernels", "0.7.0"),
    "megatron": ("megatron.core.transformer.experimental_attention_variant.dsa", "0.16.1 and 0.19.2"),
    "transformers": ("transformers.modeling_utils", "5.18 and 5.24"),
    "miles": ("miles_plugins.models.deepseek_v4.deepseek_v4", "main branch"),
    "slime": ("slime_plugins.models.glm5.glm5", "main branch"),
    "xtuner": ("xtuner.v1.module.attention.dsa_mla", "main branch"),
    "flash_mla": ("flash_mla", "January 2026"),
    "cudnn_dsa": ("cudnn", "1.32.0"),
}
SHARED = {"__init__", "handle"}


def adapter(name: str) -> Any:
    return importlib.import_module(f"slattn.frameworks.{name}")


def install(monkeypatch: pytest.MonkeyPatch, name: str, /, **contents: Any) -> Any:
    """A module of that name with those attributes, and its packages; whatever is really installed is out of sight."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:length]))
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(contents)
    return module


def test_each_file_has_a_row_here_or_serves_one() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert set(ADAPTERS) <= files
    for path in FOLDER.glob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines < (200 if path.stem in SHARED else 100), f"{path.name} has {lines} lines"


class Blocked:
    """A finder for which one package is not installed."""

    def __init__(self, top: str) -> None:
        self.top = top

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.top:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - {"flash_mla"}))
def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    top = ADAPTERS[name][0].partition(".")[0]
    for loaded in [x for x in sys.modules if x.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Blocked(top), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=f"is not installed: no module {top}"):
        adapter(name).patch()


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_version_whose_names_have_moved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    home, known = ADAPTERS[name]
    before = vars(install(monkeypatch, home)).copy()
    with pytest.raises(RuntimeError, match=rf"has no .* that slattn could replace; this adapter knows .*{known}"):
        adapter(name).patch()
    assert vars(sys.modules[home]) == before


def replaced(module: Any, name: str, new: Any) -> Patch:
    patch = Patch("somewhere", "one version")
    patch.replace(f"{module.__name__}:{name}", new)
    return patch.apply()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = type("Kind", (), {"method": len})
    return install(monkeypatch, "somewhere.home", value=1, Kind=kind, Child=type("Child", (kind,), {}), table={"a": 1})


def test_a_handle_says_and_undoes(home: Any) -> None:
    patch = replaced(home, "value", 2)
    assert home.value == 2
    assert patch.replaced == ("somewhere.home:value",)
    assert repr(patch) == "slattn in somewhere (of unknown version): replaced somewhere.home:value"
    patch.undo()
    patch.undo()
    assert home.value == 1
    assert repr(patch).endswith("replaces nothing")


def test_a_handle_is_a_context_manager_whatever_happens(home: Any) -> None:
    with pytest.raises(ZeroDivisionError), replaced(home, "value", 2):
        assert 1 // (home.value - 2)
    assert home.value == 1


def test_all_is_looked_up_before_anything_is_replaced(home: Any) -> None:
    patch = Patch("somewhere", "one version")
    patch.replace("somewhere.home:value", 2)
    with pytest.raises(RuntimeError, match=r"somewhere\.home:other that slattn could replace; this adapter knows one"):
        patch.replace("somewhere.home:other", 2)
    assert home.value == 1


def test_methods_and_what_a_class_inherits(home: Any) -> None:
    patch = replaced(home, "Child.method", max)
    assert home.Child.method is max
    assert home.Kind.method is len
    patch.undo()
    assert "method" not in vars(home.Child)


@pytest.mark.parametrize("owner", ["table", "Kind"])
def test_what_was_not_there_is_taken_away(home: Any, owner: str) -> None:
    patch = Patch("somewhere", "one version")
    patch.put("new", getattr(home, owner), "new", 2)
    patch.apply()
    found = home.table if owner == "table" else vars(home.Kind)
    assert found["new"] == 2
    patch.undo()
    assert "new" not in found


def test_patches_come_off_in_turn(home: Any) -> None:
    first, second = replaced(home, "value", 2), replaced(home, "value", 3)
    with pytest.raises(RuntimeError, match=r"somewhere\.home:value has been replaced again .* undo that first"):
        first.undo()
    assert home.value == 3
    second.undo()
    first.undo()
    assert home.value == 1


def test_captured_names_wherever_they_are(monkeypatch: pytest.MonkeyPatch, home: Any) -> None:
    def old() -> None: ...
    def new() -> None: ...

    home.function = old
    other = install(monkeypatch, "elsewhere", name=old)
    own = install(monkeypatch, "slattn._own", name=old)
    one, all_of_them = Patch("somewhere", "one version"), Patch("somewhere", "one version")
    one.replace_captured("somewhere", old, new)
    all_of_them.replace_captured("", old, new)
    with one.apply() as patch:
        assert (home.function, other.name) == (new, old)
        assert patch.replaced == ("somewhere.home:function",)
    with all_of_them.apply():
        assert (home.function, other.name, own.name) == (new, new, old)
        home.later = new  # imported while the patch was on
    assert (home.function, other.name, own.name, home.later) == (old, old, old, old)


def test_switches_go_on_last_and_off_first(home: Any) -> None:
    seen: list[tuple[str, int]] = []

    def note(word: str) -> Callable[[], None]:
        return lambda: seen.append((word, home.value))

    patch = Patch("somewhere", "one version")
    patch.switch("the model", note("on"), note("off"))
    patch.replace("somewhere.home:value", 2)
    with patch.apply():
        assert patch.replaced == ("somewhere.home:value", "the model")
    assert seen == [("on", 2), ("off", 2)]


def test_a_switch_that_raises_leaves_nothing_replaced(home: Any) -> None:
    """What an earlier switch did is undone too."""
    old, seen = home.value, []

    def fail() -> None:
        raise RuntimeError("no such model")

    patch = Patch("somewhere", "one version")
    patch.replace("somewhere.home:value", 2)
    patch.switch("the first", lambda: seen.append("on"), lambda: seen.append("off"))
    patch.switch("the model", fail, lambda: seen.append("never"))
    with pytest.raises(RuntimeError, match="no such model"):
        patch.apply()
    assert (home.value, seen, patch.replaced) == (old, ["on", "off"], ())
