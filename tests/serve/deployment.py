"""A launcher as a process, and what is left of it afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from afd_patch.hosting import free_port

ENGINE_FLAGS = ("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--dtype", "bfloat16")


class Deployment:
    """``python -m afd_patch.serve MODEL ...``, its log and its descendants."""

    def __init__(self, model: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.log = Path(tempfile.mkstemp(prefix="afd-serve-", suffix=".log")[1])
        command = [sys.executable, "-m", "afd_patch.serve", model, "--port", str(self.port), *ENGINE_FLAGS, *flags]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(env or {})},
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 180.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.text():
            self.note_descendants()
            assert self.process.poll() is None, f"the launcher ended\n{self.text()[-6000:]}"
            assert time.monotonic() < deadline, f"{text!r} did not appear\n{self.text()[-6000:]}"
            time.sleep(0.2)
        self.note_descendants()

    def note_descendants(self) -> None:
        """Remember every process that came from the launcher, also those that lose their parent later."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._seen.update({child.pid: child for child in found})

    def child(self, part: str) -> psutil.Process:
        """The direct child whose command line contains ``part``."""
        return next(child for child in psutil.Process(self.process.pid).children() if part in " ".join(child.cmdline()))

    def sockets(self) -> list[Path]:
        return [Path(path) for path in set(re.findall(r"unix:(/\S+\.sock)", self.text()))]

    def wait_gone(self, timeout: float = 60.0) -> int | None:
        """Wait for the launcher's end and assert that nothing is left; returns its exit status."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and (self.process.poll() is None or self.alive()):
            time.sleep(0.2)
        assert self.process.poll() is not None, f"the launcher did not end\n{self.text()[-6000:]}"
        assert not self.alive(), f"left running: {self.alive()}\n{self.text()[-3000:]}"
        return self.process.returncode

    def alive(self) -> list[str]:
        return [f"{p.pid} {p.name()}" for p in self._seen.values() if p.is_running() and p.status() != "zombie"]

    def destroy(self) -> None:
        """For the end of a test, whatever happened in it."""
        self.note_descendants()
        for process in (self.process, *self._seen.values()):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.log.unlink()


def shared_memory_segments() -> set[str]:
    """Names in use on this host; Python's semaphores are there for an instant, whoever makes them."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def run(*command: str, env: dict[str, str] | None = None, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """A command of ours, to its end."""
    arguments: Sequence[str] = [sys.executable, "-m", *command]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}, check=False
    )
