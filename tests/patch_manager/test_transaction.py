"""Promise 2: apply is a transaction."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from afd_patch.patch_manager import Patch, PatchError, PatchState, host, switched

SOURCE = """
def first(a, b=1):
    return a
copy = first
def second(a):
    return a
class C:
    def method(self, a):
        return a
class D(C):
    pass
box = [1]
"""


def passing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def failing_make(original: Any) -> Any:
    raise ZeroDivisionError("no way")


BAD = {
    "missing": (Patch("bad", "target:absent", host(passing), why="x"), "absent"),
    "missing method": (Patch("bad", "target:C.absent", host(passing), why="x"), "absent"),
    "missing class": (Patch("bad", "target:Absent.method", host(passing), why="x"), "Absent"),
    "no class": (Patch("bad", "target:box.append", host(passing), why="x"), "list, not a class"),
    "params": (Patch("bad", "target:second", host(passing), why="x", params=("a", "gone")), "'gone'"),
    "make": (Patch("bad", "target:second", failing_make, why="x"), "ZeroDivisionError: no way"),
    "same": (Patch("bad", "target:second", lambda original: original, why="x"), "the original"),
    "not ours to write": (
        Patch("bad", "builtins:int.bit_count", host(passing), why="x"),
        "cannot be changed",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("bad_first", [True, False])
def test_a_failure_leaves_nothing_behind(
    write: Any, manager: Any, tagging: Any, snapshot: Any, case: str, bad_first: bool
) -> None:
    write(target=SOURCE, user="from target import first", later="def f(): return 1")
    __import__("target"), __import__("user")
    before, meta_path = snapshot("target", "user"), list(sys.meta_path)
    bad, words = BAD[case]
    good = [tagging("target:first"), tagging("target:D.method"), tagging("later:f")]
    manager.register(*([bad, *good] if bad_first else [*good, bad]))

    with pytest.raises(PatchError) as caught:
        manager.apply()
    for word in ("'bad'", bad.target, words):
        assert word in str(caught.value)
    assert snapshot("target", "user") == before
    assert sys.meta_path == meta_path
    assert {status.state for status in manager.status()} == {PatchState.FAILED}
    assert __import__("later").f() == 1
    with pytest.raises(PatchError, match="not in effect"):
        manager.require_applied()


def test_the_message_names_known_parameters_and_the_way_out(write: Any, manager: Any, tagging: Any) -> None:
    write(target=SOURCE)
    __import__("target")
    manager.register(tagging("target:first", params=("b", "c", "d")))
    with pytest.raises(PatchError, match=r"'c', 'd' \(it has: a, b\); use a version"):
        manager.apply()


@pytest.mark.parametrize("target", ["C.method", "D.method", "first"])
def test_params_that_exist_pass(write: Any, manager: Any, tagging: Any, target: str) -> None:
    write(target=SOURCE)
    __import__("target")
    manager.register(tagging(f"target:{target}", params=("a",)))
    manager.apply()
    manager.require_applied()


def test_a_failure_can_be_repaired_and_applied(write: Any, manager: Any, tagging: Any) -> None:
    write(target=SOURCE)
    import target  # type: ignore[import-not-found]

    manager.register(tagging("target:second"), tagging("target:absent"))
    with pytest.raises(PatchError):
        manager.apply()
    target.absent = lambda: 1
    manager.apply()
    assert target.absent() == ("patched", 1)
    manager.restore()
    assert target.absent() == 1


def test_an_interrupt_in_make_leaves_nothing_behind(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    def make(original: Any) -> Any:
        raise KeyboardInterrupt

    write(target=SOURCE)
    __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:first"), Patch("bad", "target:second", make, why="x"))
    with pytest.raises(KeyboardInterrupt):
        manager.apply()
    assert snapshot("target") == before
    assert {status.state for status in manager.status()} == {PatchState.FAILED}


def test_what_a_failed_transaction_made_is_inert(write: Any, manager: Any, tagging: Any) -> None:
    """A reference taken in the middle of a transaction that fails must not be live afterwards."""
    switches = []

    def build(original: Any, live: Any) -> Any:
        switches.append(live)
        return lambda x: x

    write(target=SOURCE)
    __import__("target")
    manager.register(Patch("good", "target:first", switched(build), why="x"), BAD["make"][0])
    with pytest.raises(PatchError):
        manager.apply()
    assert [live() for live in switches] == [False]


def test_a_failure_after_others_were_put_in_takes_them_out(
    write: Any, manager: Any, tagging: Any, snapshot: Any
) -> None:
    """The slot of one patch changes while it is made; it is made again, and fails after the other's turn."""
    write(target=SOURCE)
    target = __import__("target")
    mine = [lambda a: "mine"]

    def make(original: Any) -> Any:
        if original is mine[0]:
            raise ZeroDivisionError("second time")
        target.second = mine[0]
        return lambda a: "never"

    before = snapshot("target")
    manager.register(tagging("target:first"), Patch("moving", "target:second", make, why="x"))
    with pytest.raises(PatchError, match="second time"):
        manager.apply()
    assert target.second is mine[0]
    del target.second
    assert snapshot("target")[0] == [item for item in before[0] if item[0] != "second"]
    assert target.first(1) == 1


def test_a_failure_leaves_earlier_patches_alone(write: Any, manager: Any, tagging: Any) -> None:
    write(target=SOURCE, later="def f(): return 1")
    import target

    manager.register(tagging("target:first"), tagging("later:f"))
    manager.apply()
    manager.register(tagging("target:absent"))
    with pytest.raises(PatchError):
        manager.apply()
    assert target.first(1) == ("patched", 1)
    assert __import__("later").f() == ("patched", 1)


@pytest.mark.parametrize("case", ["missing", "params", "make"])
def test_a_failure_at_import_comes_out_of_the_import(write: Any, manager: Any, tagging: Any, case: str) -> None:
    write(target=SOURCE, user="from target import first", elsewhere="def f(): return 1")
    bad, words = BAD[case]
    manager.register(tagging("target:first"), bad, tagging("elsewhere:f"))
    manager.apply()
    elsewhere = __import__("elsewhere")
    for _ in range(2):  # a second try must not get an unpatched module either
        with pytest.raises(PatchError) as caught:
            __import__("user")
        assert words in str(caught.value)
        assert "target" not in sys.modules
        assert "user" not in sys.modules
        states = {status.name: status for status in manager.status()}
        assert states["bad"].state is states["target:first"].state is PatchState.FAILED
        assert words in states["bad"].detail
        assert elsewhere.f() == ("patched", 1)
        with pytest.raises(PatchError, match="2 of 3 patches") as barrier:
            manager.require_applied()
        assert words in str(barrier.value)
    manager.restore()
    assert __import__("user").first(1) == 1


def test_a_swallowed_failure_is_still_known_at_the_barrier(write: Any, manager: Any) -> None:
    write(
        target=SOURCE,
        user="""
            try:
                import target
            except Exception:
                target = None
        """,
    )
    manager.register(BAD["make"][0])
    manager.apply()
    assert __import__("user").target is None
    with pytest.raises(PatchError, match="ZeroDivisionError"):
        manager.require_applied()


def test_register_refuses_doubles(manager: Any, tagging: Any) -> None:
    manager.register(tagging("m:f", "one"))
    for other in (tagging("m:f", "two"), tagging("n:g", "one"), tagging("m:f.g", "three")):
        with pytest.raises(PatchError, match="'one'"):
            manager.register(tagging("k:k", "new"), other)
    assert [status.name for status in manager.status()] == ["one"]


def test_one_slot_by_two_names_is_refused(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=SOURCE + "\nAlias = C\n")
    __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:C.method"), tagging("target:Alias.method"))
    with pytest.raises(PatchError, match="one slot has one patch"):
        manager.apply()
    assert snapshot("target") == before


@pytest.mark.parametrize("target", ["m", "m:", ":f", "m:f:g", "m.:f", "m:f.", "m f:g", ""])
def test_a_malformed_target_is_refused(tagging: Any, target: str) -> None:
    with pytest.raises(PatchError, match=r"write 'pkg\.module:attr'"):
        tagging(target, "name")


def test_optional_patches_may_be_absent(write: Any, manager: Any, tagging: Any) -> None:
    write(target=SOURCE)
    __import__("target")
    manager.register(
        tagging("target:first"),
        tagging("target:absent", optional=True),
        tagging("never_imported:f", optional=True),
    )
    manager.apply()
    states = [status.state for status in manager.status()]
    assert states == [PatchState.APPLIED, PatchState.ABSENT, PatchState.PENDING]
    manager.require_applied()
    with pytest.raises(PatchError, match="absent"):
        manager.require_applied(["target:absent"])


@pytest.mark.parametrize("constructor", ["__new__", "__init__"])
def test_the_constructors_of_object_are_refused(write: Any, manager: Any, tagging: Any, constructor: str) -> None:
    write(target=SOURCE)
    __import__("target")
    manager.register(tagging(f"target:C.{constructor}"))
    with pytest.raises(PatchError, match="only has object's"):
        manager.apply()
