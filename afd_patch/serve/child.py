"""One child process of the launcher: its output with a name in front, and a certain end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from afd_patch.hosting import end_with_parent

#: Seconds that the rest of a process group has to end by itself, once its leader has.
_GROUP_GRACE = 5.0


class ChildProcess:
    """``command`` in a process group of its own; ``seen`` is set when a line contains ``marker``.

    With ``echo``, its output appears on ours, its name in front of each line.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, marker: str = "", echo: bool = True
    ) -> None:
        self.name = name
        self.seen = threading.Event()
        self.last_lines: deque[str] = deque(maxlen=20)
        self._marker = marker
        self._echo = echo
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher only, which stops its children in order
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # if the launcher is killed and can stop nobody
        )
        self._relay = threading.Thread(target=self._relay_output, name=f"output of {name}", daemon=True)
        self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or ``None`` while it runs."""
        return self._process.poll()

    def _relay_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_lines.append(line.rstrip())
            if self._marker and self._marker in line:
                self.seen.set()
            if self._echo:
                sys.stdout.write(f"{self.name} | {line}")
                sys.stdout.flush()

    def terminate(self, timeout: float) -> None:
        """SIGTERM, and SIGKILL to the whole group for what is left after ``timeout`` seconds."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        # Python's resource tracker, which is part of the group, removes shared memory when all others have ended.
        deadline = time.monotonic() + _GROUP_GRACE
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.05)
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.join_output()

    def join_output(self) -> None:
        """Wait until ``last_lines`` holds the end of the output of a child that has ended."""
        self._relay.join(timeout=5)
