"""Promise 3: modules are patched at import, before anyone can bind a name from them, and stay native."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

import pytest

from afd_patch.patch_manager import Patch, PatchError, PatchManager, PatchState

TARGET = """
loader_seen_inside = __loader__
spec_loader_seen_inside = __spec__.loader
def f(x):
    return x
class C:
    def m(self, x):
        return x
"""


def test_names_bound_during_and_after_the_import_are_patched(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user="from target import f, C\nimport target as t")
    manager.register(tagging("target:f"), tagging("target:C.m"))
    manager.apply()
    assert "target" not in sys.modules
    assert [status.state for status in manager.status()] == [PatchState.PENDING] * 2
    user = __import__("user")
    assert user.f(1) == user.t.f(1) == user.C().m(1) == ("patched", 1)
    assert {status.state for status in manager.status()} == {PatchState.APPLIED}
    manager.restore()
    assert user.f(1) == user.t.f(1) == user.C().m(1) == 1
    assert user.f is user.t.f


def test_imported_already_and_not_yet_give_the_same(write: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    early, late = PatchManager(), PatchManager()
    early.register(tagging("target:f"))
    with early.applied():
        patched_at_import = __import__("target")
        first = snapshot("target")
    pristine = snapshot("target")
    late.register(tagging("target:f"))
    with late.applied():
        assert [key for key, _ in snapshot("target")[0]] == [key for key, _ in first[0]]
        assert patched_at_import.f(1) == ("patched", 1)
    assert snapshot("target") == pristine


def test_the_module_keeps_native_loader_and_spec(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, other="x = 1")
    manager.register(tagging("target:f"))
    manager.apply()
    target, other = __import__("target"), __import__("other")
    for loader in (
        target.__loader__,
        target.__spec__.loader,
        target.loader_seen_inside,
        target.spec_loader_seen_inside,
    ):
        assert type(loader) is type(other.__loader__)
    assert type(target.__spec__) is type(other.__spec__)
    assert target.__spec__._initializing is False
    assert target.__file__ == target.__spec__.origin
    assert inspect.getsource(target) == TARGET
    assert "class C" in inspect.getsource(target.C)
    assert importlib.reload(target) is target


def test_before_its_execution_a_spec_can_be_asked_everything(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    manager.register(tagging("target:f"))
    manager.apply()
    spec = importlib.util.find_spec("target")
    assert spec is not None and spec.loader is not None
    assert spec.loader.get_source("target") == TARGET  # type: ignore[attr-defined]
    assert spec.loader.is_package("target") is False  # type: ignore[attr-defined]
    assert spec.origin is not None and spec.origin.endswith("target.py")
    # A private copy, as tools make it, is not the import that is waited for.
    private = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(private)
    assert private.f(1) == 1
    assert type(private.__loader__) is type(spec.loader) is type(private.__spec__.loader)
    assert manager.status()[0].state is PatchState.PENDING
    assert __import__("target").f(1) == ("patched", 1)


def test_restore_before_the_import_cancels(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    manager.register(tagging("target:f"))
    manager.apply()
    spec = importlib.util.find_spec("target")
    assert spec is not None and spec.loader is not None
    manager.restore()
    assert manager.status()[0].state is PatchState.RESTORED
    module = importlib.util.module_from_spec(spec)  # found while armed, executed after the restore
    sys.modules["target"] = module
    spec.loader.exec_module(module)
    assert module.f(1) == 1
    del sys.modules["target"]
    assert __import__("target").f(1) == 1


def test_submodules_and_packages(write: Any, manager: Any, tagging: Any) -> None:
    write(
        pkg__="from pkg.sub import f\ndef g(x): return f(x)\n",
        pkg__sub="def f(x): return x\n",
        pkg__other="from . import g\nfrom .sub import f\n",
    )
    manager.register(tagging("pkg:g"), tagging("pkg.sub:f"))
    manager.apply()
    other = importlib.import_module("pkg.other")
    assert other.f(1) == ("patched", 1)
    assert other.g(1) == ("patched", ("patched", 1))
    manager.restore()
    assert other.f(1) == other.g(1) == 1


def test_a_module_whose_own_import_fails_stays_armed(write: Any, manager: Any, tagging: Any) -> None:
    write(target="raise ImportError('not today')")
    manager.register(tagging("target:f"))
    manager.apply()
    with pytest.raises(ImportError, match="not today"):
        __import__("target")
    assert manager.status()[0].state is PatchState.PENDING
    write(target=TARGET)
    assert __import__("target").f(1) == ("patched", 1)


HALF = """
import plugin
plugin.during(__name__)
def f(x):
    return x
import circular
"""


def test_a_half_initialised_module_is_patched_when_its_import_ends(
    write: Any, manager: Any, tagging: Any, snapshot: Any
) -> None:
    """apply() is called by code that the target's own import runs, before the target defines anything."""
    write(half=HALF, circular="from half import f", plugin="hook = None\ndef during(name): hook(name)")
    plugin = __import__("plugin")

    def hook(name: str) -> None:
        manager.register(tagging(f"{name}:f"))
        manager.apply()
        manager.apply()
        assert manager.status()[0].state is PatchState.PENDING
        assert "is being imported" in manager.status()[0].detail

    plugin.hook = hook
    half = __import__("half")
    assert half.f(1) == ("patched", 1)
    assert sys.modules["circular"].f is half.f
    assert type(half.__spec__) is type(sys.modules["circular"].__spec__)
    assert half.__spec__._initializing is False
    manager.restore()
    assert half.f(1) == 1
    assert sys.modules["circular"].f is half.f


def test_a_half_initialised_module_that_cannot_be_patched_fails_its_import(
    write: Any, manager: Any, tagging: Any
) -> None:
    write(half="import plugin\nplugin.hook()\ndef f(x): return x\n", plugin="hook = None")
    manager.register(tagging("half:absent"))
    __import__("plugin").hook = manager.apply
    with pytest.raises(PatchError, match="absent"):
        __import__("half")
    assert "half" not in sys.modules
    assert manager.status()[0].state is PatchState.FAILED


def test_restore_cancels_for_a_half_initialised_module_too(write: Any, manager: Any, tagging: Any) -> None:
    write(half="import plugin\nplugin.hook()\ndef f(x): return x\n", plugin="hook = None")
    manager.register(tagging("half:f"))

    def hook() -> None:
        manager.apply()
        manager.restore()

    __import__("plugin").hook = hook
    half = __import__("half")
    assert half.f(1) == 1
    assert type(half.__spec__) is type(sys.modules["plugin"].__spec__)


def test_two_managers_wait_for_the_same_module(write: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    one, two = PatchManager(), PatchManager()
    one.register(tagging("target:f"))
    two.register(tagging("target:C.m"))
    with one.applied(), two.applied():
        target = __import__("target")
        assert target.f(1) == target.C().m(1) == ("patched", 1)
        assert type(target.__loader__).__name__ == type(target.__spec__.loader).__name__ == "SourceFileLoader"
    assert target.f(1) == target.C().m(1) == 1


def test_other_import_hooks_on_the_same_module(write: Any, manager: Any, tagging: Any) -> None:
    """wrapt's own import hook, as other instrumentation uses it, in front of ours."""
    import wrapt

    write(target=TARGET)
    manager.register(tagging("target:f"))
    manager.apply()
    seen = []
    wrapt.register_post_import_hook(lambda module: seen.append(module.f(1)), "target")
    target = __import__("target")
    assert seen == [("patched", 1)]
    assert target.f(1) == ("patched", 1)
    assert type(target.__loader__).__name__ == type(target.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_finder_in_front_that_hides_ours_is_noticed(write: Any, manager: Any, tagging: Any) -> None:
    from importlib.machinery import PathFinder

    write(target=TARGET)
    manager.register(tagging("target:f"))
    manager.apply()
    sys.meta_path.insert(0, PathFinder)
    try:
        target = __import__("target")
    finally:
        sys.meta_path.remove(PathFinder)
        sys.meta_path.append(PathFinder)
    assert target.f(1) == 1
    with pytest.raises(PatchError, match="imported past our finder"):
        manager.require_applied()
    manager.apply()
    assert target.f(1) == ("patched", 1)


def test_make_may_import(write: Any, manager: Any) -> None:
    write(target=TARGET, helper="import target\ndef helper(x): return ('helped', x)")

    def make(original: Any) -> Any:
        from helper import helper  # type: ignore[import-not-found]

        return lambda x: helper(original(x))

    manager.register(Patch("importing", "target:f", make, why="test"))
    manager.apply()
    assert __import__("target").f(1) == ("helped", 1)
