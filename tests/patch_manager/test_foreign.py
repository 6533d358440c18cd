"""Promise 5: somebody else's wrapper survives our restore; what cannot be restored exactly is reported."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import wrapt

from afd_patch.patch_manager import Patch, PatchState, RestoreConflict

TARGET = """
def f(x):
    return x
def g(x):
    return x
class C:
    def m(self, x):
        return x
class D(C):
    pass
"""


def by_wraps(original: Any) -> Any:
    @functools.wraps(original)
    def foreign(*args: Any) -> Any:
        return "foreign", original(*args)

    return foreign


def by_closure(original: Any) -> Any:
    def foreign(*args: Any) -> Any:
        return "foreign", original(*args)

    return foreign


def by_wrapt(original: Any) -> Any:
    def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return "foreign", wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, foreign)


def by_partial(original: Any) -> Any:
    return functools.partial(original)


WRAPPERS = [by_wraps, by_closure, by_wrapt]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_foreign_wrapper_below_survives(write: Any, manager: Any, tagging: Any, snapshot: Any, wrap: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    target.f = wrap(target.f)
    target.C.m = wrap(target.C.m)
    before = snapshot("target")
    manager.register(tagging("target:f"), tagging("target:C.m"))
    with manager.applied():
        assert target.f(1) == target.C().m(1) == ("patched", ("foreign", 1))
    assert snapshot("target") == before
    assert target.f(1) == target.C().m(1) == ("foreign", 1)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("path", ["f", "C.m", "D.m"])
def test_a_foreign_wrapper_above_survives_and_ours_is_inert(
    write: Any, manager: Any, tagging: Any, wrap: Any, path: str
) -> None:
    write(target=TARGET)
    target = __import__("target")
    owner = target if path == "f" else getattr(target, path[0])
    attr = path[-1]

    def call() -> Any:
        return target.f(1) if path == "f" else owner().m(1)

    g = [target.g]
    manager.register(tagging("target:g"), tagging(f"target:{path}"))
    manager.apply()
    ours = vars(owner)[attr]
    setattr(owner, attr, wrap(ours))
    foreign = vars(owner)[attr]
    assert call() == ("foreign", ("patched", 1))
    status = manager.status()[1]
    assert status.state is PatchState.APPLIED
    assert f"test_foreign.{wrap.__name__}.<locals>.foreign" in status.detail
    manager.require_applied()

    for _ in range(2):
        with pytest.raises(RestoreConflict) as caught:
            manager.restore()
        for word in (f"test_foreign.{wrap.__name__}.<locals>.foreign", f"target:{path}", "inert"):
            assert word in str(caught.value)
        assert vars(owner)[attr] is foreign
        assert call() == ("foreign", 1)
        assert target.g is g[0]  # the others were restored all the same
        states = [status.state for status in manager.status()]
        assert states == [PatchState.RESTORED, PatchState.CONFLICT]

    manager.apply()  # ours is beneath still: switched on again, not put on top
    assert vars(owner)[attr] is foreign
    assert call() == ("foreign", ("patched", 1))
    assert target.g(1) == ("patched", 1)

    setattr(owner, attr, ours)  # the owner takes its wrapper back, as it should
    manager.restore()
    assert call() == 1
    assert (attr in vars(owner)) is (path != "D.m")


def test_after_a_conflict_restore_succeeds_once_the_owner_is_gone(
    write: Any, manager: Any, tagging: Any, snapshot: Any
) -> None:
    write(target=TARGET)
    target = __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:f"))
    manager.apply()
    ours = [target.f]
    target.f = by_wraps(target.f)
    with pytest.raises(RestoreConflict):
        manager.restore()
    target.f = ours[0]
    manager.restore()
    assert snapshot("target") == before
    assert manager.status()[0].state is PatchState.RESTORED


def test_an_overwritten_slot_is_not_overwritten_back(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"))
    manager.apply()
    target.f = mine = lambda x: "mine"
    assert manager.status()[0].state is PatchState.LOST
    with pytest.raises(RestoreConflict, match=r"test_foreign.*<lambda>"):
        manager.restore()
    assert target.f is mine


def test_a_deleted_slot_is_a_conflict(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"))
    manager.apply()
    del target.f
    assert manager.status()[0].state is PatchState.LOST
    with pytest.raises(RestoreConflict, match="somebody deleted it"):
        manager.restore()
    assert "f" not in vars(target)


def test_a_slot_that_somebody_restored_for_us_is_fine(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    before = snapshot("target")
    originals = [target.f]
    manager.register(tagging("target:f"), tagging("target:D.m"))
    manager.apply()
    target.f = originals[0]
    del target.D.m
    manager.restore()
    assert snapshot("target") == before


def test_a_plain_replacement_under_a_foreign_wrapper_says_so(write: Any, manager: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(Patch("plain", "target:f", lambda original: lambda x: ("plain", x), why="test"))
    manager.apply()
    target.f = by_wraps(target.f)
    with pytest.raises(RestoreConflict, match="plain replacement"):
        manager.restore()


def test_a_conflict_comes_out_of_the_scope(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"))
    with pytest.raises(RestoreConflict), manager.applied():
        target.f = by_partial(target.f)
    assert target.f(1) == 1


def test_a_foreign_subclass_of_our_class_is_seen(write: Any, manager: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(Patch("class", "target:C", lambda cls: type("C", (cls,), {}), why="test"))
    manager.apply()
    target.C = type("Mine", (target.C,), {"__module__": "somewhere"})
    assert manager.status()[0].state is PatchState.APPLIED
    with pytest.raises(RestoreConflict, match=r"somewhere\.Mine"):
        manager.restore()
