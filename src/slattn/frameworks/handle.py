"""What a `patch()` replaced, and the way back.

An adapter looks up all that it replaces before it replaces any of it: on a version whose names have moved it raises
and has changed nothing. Names are written "package.module:attribute" or "package.module:Class.attribute".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

_ABSENT = object()


class Patch:
    """Replacements in one framework; a context manager that undoes them at its end.

    Attributes:
        replaced: what was replaced, name by name; empty before `apply` and after `undo`.
    """

    def __init__(self, distribution: str, known: str) -> None:
        """Nothing is imported or replaced yet.

        Args:
            distribution: the framework's name on PyPI, for its version and for the errors.
            known: the versions that the adapter was written for, in words.
        """
        self.distribution, self.known = distribution, known
        self.replaced: tuple[str, ...] = ()
        self._changes: list[tuple[str, Any, str, Any, Any]] = []  # name, owner, key, old, new
        self._captured: list[tuple[str, Any, Any]] = []  # package, old, new
        self._switches: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = []  # name, on, off

    def original(self, path: str) -> Any:
        """What stands at `path` now.

        Raises:
            ModuleNotFoundError: the framework is not installed.
            RuntimeError: it is, but has no such name.
        """
        owner, key = self._owner(path)
        return getattr(owner, key)

    def replace(self, path: str, new: Any) -> None:
        """Put `new` at `path` when `apply` is called. Raises as `original`."""
        owner, key = self._owner(path)
        self._changes.append((path, owner, key, _read(owner, key), new))

    def put(self, name: str, owner: Any, key: str, new: Any, *, must_exist: bool = False) -> None:
        """Set an item of a mapping, or an attribute of another object; `undo` takes away what was not there.

        Raises:
            RuntimeError: it has to be there, and is not.
        """
        if must_exist and _read(owner, key) is _ABSENT:
            raise RuntimeError(self._moved(name))
        self._changes.append((name, owner, key, _read(owner, key), new))

    def replace_captured(self, package: str, old: Any, new: Any) -> None:
        """Put `new` wherever a module holds `old` under any name, as `from x import old` leaves it.

        `package` is a top-level package; "" means every one but slattn, whose own backends keep the original.
        """
        self._captured.append((package, old, new))

    def switch(self, name: str, on: Callable[[], Any], off: Callable[[], Any]) -> None:
        """Call `on` after everything is in place, and `off` before anything is put back."""
        self._switches.append((name, on, off))

    def apply(self) -> Patch:
        """Replace all of it, or nothing: where a switch raises, what was done is undone."""
        names = []
        for name, owner, key, _, new in self._changes:
            _write(owner, key, new)
            names.append(name)
        for package, old, new in self._captured:
            names += _swap(package, old, new)
        switched: list[Callable[[], Any]] = []
        try:
            for name, on, off in self._switches:
                on()
                names.append(name)
                switched.append(off)
        except BaseException:
            self._put_back(switched)
            raise
        self.replaced = tuple(names)
        return self

    def undo(self) -> None:
        """Put everything back; a second call does nothing.

        Raises:
            RuntimeError: something else has been put in the place of a replacement since, and has to go first.
        """
        if not self.replaced:
            return
        for name, owner, key, _, new in self._changes:
            if _read(owner, key) is not new:
                raise RuntimeError(f"{name} has been replaced again since slattn replaced it: undo that first")
        self._put_back([off for _, _, off in self._switches])
        self.replaced = ()

    def _put_back(self, switched: list[Callable[[], Any]]) -> None:
        for off in reversed(switched):
            off()
        for package, old, new in reversed(self._captured):
            _swap(package, new, old)
        for _, owner, key, old, _ in reversed(self._changes):
            _write(owner, key, old)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        done = f"replaced {', '.join(self.replaced)}" if self.replaced else "replaces nothing"
        return f"slattn in {self.distribution} {version(self.distribution)}: {done}"

    def _owner(self, path: str) -> tuple[Any, str]:
        module, _, names = path.partition(":")
        top = module.partition(".")[0]
        try:
            owner: Any = importlib.import_module(module)
            *outer, key = names.split(".")
            for name in outer:
                owner = getattr(owner, name)
            if not hasattr(owner, key):
                raise AttributeError(f"{owner!r} has no {key}")
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == top:
                raise ModuleNotFoundError(f"{self.distribution} is not installed: no module {top}", name=top) from None
            raise RuntimeError(f"{self._moved(path)} ({error})") from error
        return owner, key

    def _moved(self, name: str) -> str:
        return (
            f"{self.distribution} {version(self.distribution)} has no {name} that slattn could replace; "
            f"this adapter knows {self.known}"
        )


def version(distribution: str) -> str:
    """Its version as installed, or words for that it cannot be told."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"


def _read(owner: Any, key: str) -> Any:
    return owner.get(key, _ABSENT) if isinstance(owner, MutableMapping) else vars(owner).get(key, _ABSENT)


def _write(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        if value is _ABSENT:
            del owner[key]
        else:
            owner[key] = value
    elif value is _ABSENT:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


def _swap(package: str, old: Any, new: Any) -> list[str]:
    """Replace old by new in the loaded modules of a package, "" all but slattn; the names at which it stood."""
    names = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top == package or (not package and top != "slattn"):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    setattr(module, key, new)
                    names.append(f"{name}:{key}")
    return names
