"""Promise 7, processes: fork inherits and restores alone; spawn starts native and applies its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from afd_patch import errors

TARGET = "def f(x): return x\n"

SPAWNING = """
import multiprocessing, sys
import target
from afd_patch.patch_manager import Patch, PatchManager, host

def tag(wrapped, instance, args, kwargs):
    return "patched", wrapped(*args, **kwargs)

def activate():
    manager = PatchManager()
    manager.register(Patch("f", "target:f", host(tag), why="test"))
    manager.apply()
    return manager

def child(queue):
    inherited = target.f(1)
    manager = activate()
    manager.require_applied()
    queue.put((inherited, target.f(1)))

if __name__ == "__main__":
    activate()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=30))
    process.join()
    assert target.f(1) == ("patched", 1)
"""


def in_child(function: Any) -> int:
    """Runs a function in a forked child; 0 if it returned true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(int(os.environ.get("PATCH_TESTS_PATIENCE", "20")))  # a deadlocked child dies of it
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_inherits_and_restores_alone(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET, later=TARGET)
    target = __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:f"), tagging("later:f"))
    manager.apply()
    patched = snapshot("target")

    def child() -> bool:
        inherited = target.f(1) == __import__("later").f(1) == ("patched", 1)
        manager.restore()
        return inherited and snapshot("target") == before and target.f(1) == 1

    assert in_child(child) == 0
    assert "later" not in sys.modules
    assert snapshot("target") == patched
    assert target.f(1) == ("patched", 1)
    manager.restore()
    assert snapshot("target") == before


def test_a_fork_while_another_thread_is_changing_slots(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    """The child never inherits a lock that nobody will release, nor half a change."""
    write(target=TARGET)
    __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:f"))
    stop = threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            manager.apply()
            manager.restore()

    thread = threading.Thread(target=toggle)
    thread.start()
    try:

        def child() -> bool:
            manager.restore()
            return bool(snapshot("target") == before)

        assert all(in_child(child) == 0 for _ in range(8))
    finally:
        stop.set()
        thread.join()


def test_a_spawned_child_starts_native_and_applies_its_own(tmp_path: Path) -> None:
    root = Path(errors.__file__).parents[1]
    (tmp_path / "target.py").write_text(TARGET)
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(tmp_path)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "(1, ('patched', 1))"
