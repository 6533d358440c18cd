"""Fixtures for the patch manager's tests: small modules on disk, and snapshots that compare by identity.

Nothing here imports vLLM or torch: these tests also run against deliberately broken copies of the manager.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afd_patch.patch_manager import Patch, PatchManager, RestoreConflict, host

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules that can be imported until the test ends.

    ``name=source``, where ``a__b`` is the module ``a.b`` and ``a__`` the package ``a``.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(**sources: str) -> None:
        for name, source in sources.items():
            package, _, rest = name.partition("__")
            path = tmp_path / package / f"{rest or '__init__'}.py" if "__" in name else tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def manager() -> Iterator[PatchManager]:
    """A manager; whatever it still has in place when the test ends is taken back."""
    manager = PatchManager()
    yield manager
    with contextlib.suppress(RestoreConflict):
        manager.restore()


@pytest.fixture
def tagging() -> Callable[..., Patch]:
    """Makes host patches whose calls return ``("patched", result)``."""

    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return "patched", wrapped(*args, **kwargs)

    def tagging(target: str, name: str = "", **more: Any) -> Patch:
        return Patch(name or target, target, host(wrapper), why="the test asks for it", **more)

    return tagging


@pytest.fixture
def snapshot() -> Callable[..., list[Any]]:
    """Looks at modules and the classes in them: keys in order, values by identity (and kept alive)."""

    def snapshot(*names: str) -> list[Any]:
        todo = [sys.modules[name] for name in names]
        seen: list[Any] = []
        for owner in todo:
            is_class = issubclass(type(owner), type)
            space = vars(type)["__dict__"].__get__(owner) if is_class else vars(owner)
            seen.append([(key, id(value), value) for key, value in space.items() if key != "__builtins__"])
            for value in space.values():
                is_new = issubclass(type(value), type) and not any(value is other for other in todo)
                if is_new and vars(type)["__dict__"].__get__(value).get("__module__") in names:
                    todo.append(value)
        return [[(key, number) for key, number, _ in items] for items in seen]

    return snapshot
