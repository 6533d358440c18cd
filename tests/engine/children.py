"""``Child``: a function in a process forked from the fork server, with its log, its result and a certain end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Removed when the test process ends.
_logs = tempfile.TemporaryDirectory(prefix="afd-test-logs-")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.engine.preload"])


class Child:
    """``function(*args, **kwargs)`` in a process group of its own, with ``env`` added to its environment."""

    def __init__(
        self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, **kwargs: Any
    ) -> None:
        self.log = Path(tempfile.mkstemp(dir=_logs.name, suffix=".log")[1])
        self._result, write = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(write, str(self.log), env or {}, function, args, kwargs))
        self._process.start()
        write.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def outcome(self, timeout: float = 240.0) -> tuple[str, Any]:
        """``("value", result)``, ``("exit", message)``, ``("error", "Class: message")`` or ``("died", log)``."""
        if not self._result.poll(timeout):
            self.kill()
            raise AssertionError(f"no result within {timeout} s\n{self.text()[-6000:]}")
        try:
            outcome: tuple[str, Any] = self._result.recv()
        except EOFError:
            outcome = ("died", self.text()[-3000:])
        self._process.join(30)
        return outcome

    def result(self, timeout: float = 240.0) -> Any:
        """What the function returned; anything else is an ``AssertionError`` with the end of the log."""
        kind, value = self.outcome(timeout)
        assert kind == "value", f"{kind}: {value}\n{self.text()[-6000:]}"
        return value

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Wait until ``text`` is in the log."""
        for _ in range(int(timeout / 0.1)):
            if text in self.text():
                return
            self._process.join(0.1)
            if self._process.exitcode is not None and text not in self.text():
                break
        raise AssertionError(f"{text!r} did not appear\n{self.text()[-6000:]}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL for the whole group, and wait."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join()

    def stop(self, timeout: float = 30.0) -> None:
        """SIGTERM, then wait; SIGKILL when it does not end."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout)
        if self._process.is_alive():
            self.kill()


def _run(
    write: Connection,
    log: str,
    env: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    try:
        outcome: tuple[str, Any] = ("value", function(*args, **kwargs))
    except SystemExit as error:
        outcome = ("exit", str(error))
    except BaseException as error:  # the test decides what it means
        traceback.print_exc()
        outcome = ("error", f"{type(error).__name__}: {error}")
    write.send(outcome)
    write.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an in-process engine does not always end by itself
