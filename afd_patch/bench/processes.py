"""Processes that a benchmark measures: with a log, in groups that can be stopped and continued, and a certain end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from afd_patch.errors import ConfigError
from afd_patch.hosting import end_with_parent

_ERROR = re.compile(r"\b\w*(Error|Exception|Exit)\b: |afd_patch: ")
_START_TIMEOUT = 600.0
#: Seconds that an engine has after its answer to finish what it has begun, before it is stopped.
_SETTLE = 0.1
#: Seconds that a process which was told to end has until it is killed.
_LAST_WORDS = 30.0


def environment(**settings: str) -> dict[str, str]:
    """This environment without the caller's AFD settings, without a look at the hub, plus ``settings``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AFD_")}
    return {**own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **settings}


class Group:
    """``python -m MODULE ARGUMENTS`` and its descendants, as a process group; its output goes to ``log``."""

    def __init__(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=fds,
                preexec_fn=partial(end_with_parent, signal.SIGKILL),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """What it has said so far."""
        with self.log.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def wait_for(self, marker: str, timeout: float = _START_TIMEOUT) -> None:
        """Wait until ``marker`` is in its output; raises ``ConfigError`` when that cannot happen any more."""
        deadline = time.monotonic() + timeout
        while marker not in self.output():
            self.require_running()
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.name} was not ready within {timeout:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def require_running(self) -> None:
        if not self.running:
            raise ConfigError(f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}")

    def wait(self, timeout: float) -> None:
        """Wait for its end; raises ``ConfigError`` when it does not come."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self.name} did not end within {timeout:.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        """The lines that name errors, which vLLM prints far above its last words, and the last ones."""
        lines = self.output().splitlines()
        errors = [line for line in lines[:-8] if _ERROR.search(line)]
        return "\n".join(f"  {line}" for line in errors[-8:] + lines[-8:])

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Wait until it has ended, as it was told to; kill what has not, which leaves shared memory behind."""
        with suppress(ConfigError):
            self.wait(_LAST_WORDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of it, and wait for the first process."""
        self.signal(signal.SIGKILL)
        self._process.wait()


class Engine:
    """An engine of ``bench.engine`` with the processes it needs; stopped (SIGSTOP) except during ``ask``.

    Engines idle actively, so those whose turn it is not must really stand still.
    """

    def __init__(
        self, name: str, flags: Sequence[str], env: Mapping[str, str], log: Path, helpers: Sequence[Group] = ()
    ) -> None:
        self.name = name
        self.patches = 0
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        arguments = ["afd_patch.bench.engine", str(command_read), str(answer_write), *flags]
        self._group = Group(name, arguments, env, log, fds=(command_read, answer_write))
        os.close(command_read)
        os.close(answer_write)
        self._commands = os.fdopen(command_write, "w", buffering=1)
        self._answers = os.fdopen(answer_read)
        self._groups = [*helpers, self._group]

    def wait_ready(self) -> None:
        """Wait until it is built, then stop it."""
        self.patches = self._receive()["patches"]
        self._signal(signal.SIGSTOP)

    def ask(self, **command: int) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            self._commands.write(json.dumps(command) + "\n")
            answer = self._receive()
            time.sleep(_SETTLE)
            return answer
        finally:
            self._signal(signal.SIGSTOP)

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self._group.kill()
            raise ConfigError(f"{self.name} ended:\n{self._group.tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        for group in self._groups:
            group.signal(number)

    def close(self) -> None:
        self._commands.close()  # it ends
        self._signal(signal.SIGCONT)
        self._group.end()
        for group in self._groups:
            group.kill()
        self._answers.close()
