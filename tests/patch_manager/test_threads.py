"""Promise 7, threads: no torn call, and no import under our lock."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from afd_patch.patch_manager import Patch, PatchManager, PatchState, host

TARGET = """
def f(x):
    return x
class C:
    def m(self, x):
        return x
"""
PATIENCE = float(os.environ.get("PATCH_TESTS_PATIENCE", "20"))  # seconds until a test is called deadlocked


def run(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions in daemon threads; an exception in one is raised here, a deadlock is a TimeoutError."""
    futures: list[Future[Any]] = [Future() for _ in functions]

    def settle(future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised in the thread that waits
            future.set_exception(error)

    for pair in zip(futures, functions, strict=True):
        threading.Thread(target=settle, args=pair, daemon=True).start()
    return [future.result(PATIENCE) for future in futures]


def test_no_torn_call_while_patches_come_and_go(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user="from target import f")
    target, user = __import__("target"), __import__("user")
    manager.register(tagging("target:f"), tagging("target:C.m"))
    stop = threading.Event()
    seen: set[Any] = set()

    def call() -> None:
        instance = target.C()
        while not stop.is_set():
            seen.update((target.f(1), user.f(1), instance.m(1)))

    def toggle() -> None:
        try:
            for _ in range(25):
                manager.apply()
                manager.restore()
        finally:
            stop.set()

    run(call, call, toggle)
    assert seen <= {1, ("patched", 1)}
    assert target.f(1) == user.f(1) == target.C().m(1) == 1


def test_apply_in_many_threads_patches_once(write: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    before = snapshot("target")
    for _ in range(30):
        manager = PatchManager()
        manager.register(tagging("target:f"), tagging("target:C.m"))
        barrier = threading.Barrier(4)

        def apply(barrier: Any = barrier, manager: Any = manager) -> None:
            barrier.wait(PATIENCE)
            manager.apply()
            manager.require_applied()

        run(apply, apply, apply, apply)
        assert target.f(1) == target.C().m(1) == ("patched", 1)
        run(manager.restore, manager.restore)
        assert snapshot("target") == before


def test_an_import_in_another_thread_does_not_deadlock(write: Any, tagging: Any) -> None:
    """One thread imports ``slow`` and needs our lock in its hook; the other applies, and imports ``slow``."""
    manager = PatchManager()  # restored here, not by the fixture: after a deadlock that would wait forever
    write(
        slow="import gate\ngate.inside.set()\ngate.go_on.wait(20)\ndef f(x): return x\n",
        gate="import threading\ninside, go_on = threading.Event(), threading.Event()\n",
        target=TARGET,
    )
    gate = __import__("gate")
    __import__("target")

    def make(original: Any) -> Any:
        gate.go_on.set()
        import slow  # type: ignore[import-not-found]  # waits until the other thread's import is done

        return lambda x: ("made", slow.f(x))

    manager.register(tagging("slow:f"))
    manager.apply()
    manager.register(Patch("importing", "target:f", make, why="test"))

    def importing() -> Any:
        return __import__("slow").f(1)

    def applying() -> None:
        assert gate.inside.wait(PATIENCE)
        manager.apply()

    run(importing, applying)
    manager.require_applied()
    assert sys.modules["target"].f(1) == ("made", ("patched", 1))
    manager.restore()


def test_apply_while_another_thread_is_importing_the_target(write: Any, manager: Any, tagging: Any) -> None:
    write(
        slow="import gate\ngate.inside.set()\ngate.go_on.wait(20)\ndef f(x): return x\n",
        gate="import threading\ninside, go_on = threading.Event(), threading.Event()\n",
    )
    gate = __import__("gate")
    manager.register(tagging("slow:f"))

    def applying() -> None:
        assert gate.inside.wait(PATIENCE)
        manager.apply()
        assert manager.status()[0].state is PatchState.PENDING
        gate.go_on.set()

    slow, _ = run(lambda: __import__("slow"), applying)
    assert slow.f(1) == ("patched", 1)
    assert manager.status()[0].state is PatchState.APPLIED
    assert type(slow.__spec__).__name__ == "ModuleSpec"
    assert type(slow.__spec__) is type(gate.__spec__)


def test_restore_while_a_patch_is_being_made_wins(write: Any, manager: Any, snapshot: Any) -> None:
    write(target=TARGET)
    __import__("target")
    before = snapshot("target")
    making, restored = threading.Event(), threading.Event()

    def make(original: Any) -> Any:
        making.set()
        assert restored.wait(PATIENCE)
        return lambda x: "late"

    def restoring() -> None:
        assert making.wait(PATIENCE)
        manager.restore()
        restored.set()

    manager.register(Patch("slow", "target:f", make, why="test"))
    run(manager.apply, restoring)
    assert snapshot("target") == before
    assert manager.status()[0].state is PatchState.RESTORED


def test_a_slot_that_changes_while_the_patch_is_made(write: Any, manager: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    native = target.f
    changes = iter([lambda x: "first", lambda x: "second"])

    def make(original: Any) -> Any:
        target.f = next(changes, target.f)
        return lambda x: ("patched", original(x))

    manager.register(Patch("moving", "target:f", make, why="test"))
    manager.apply()
    assert target.f(1) == ("patched", "second")
    manager.restore()
    assert target.f(1) == "second"
    assert native is not target.f


def test_removing_the_finder_does_not_disturb_other_imports(manager: Any, tagging: Any) -> None:
    """An import in another thread iterates over sys.meta_path; nothing may shift beneath it."""
    manager.register(tagging("not_there_yet:f"))
    manager.apply()
    finders = list(sys.meta_path)
    seen = []
    for place, finder in enumerate(sys.meta_path):
        if place == 1:
            manager.restore()
        seen.append(finder)
    assert seen == finders
    assert sys.meta_path == finders[1:]


def test_calls_that_began_patched_end_patched(write: Any, manager: Any) -> None:
    write(target=TARGET)
    target = __import__("target")

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        manager.restore()
        return "patched", wrapped(*args, **kwargs)

    manager.register(Patch("self-restoring", "target:f", host(wrapper), why="test"))
    manager.apply()
    assert target.f(1) == ("patched", 1)
    assert target.f(1) == 1
