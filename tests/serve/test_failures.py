"""What a user sees when the FFN server goes away: a stream that finishes with the right text, or a clear end.

Stock vLLM's OpenAI server in the attention role, and an FFN server that the tests kill, stop and start again. The rows
of docs/failures.md about servers that go away are here; those about connections and bytes are in tests/connectors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from afd_patch.hosting import free_port
from tests.serve.deployment import ENGINE_FLAGS

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
LONG = {"temperature": 0.0, "max_tokens": 440, "extra_body": {"ignore_eos": True}}


class Process:
    """A command in a process group of its own, with its log."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.log = Path(tempfile.mkstemp(prefix="afd-failures-", suffix=".log")[1])
        with self.log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENV, **(env or {})},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.text()[-5000:]
            assert self.popen.poll() is None, self.text()[-5000:]
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        os.killpg(self.popen.pid, number)

    def destroy(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.popen.wait()
        self.log.unlink(missing_ok=True)


class Split:
    """An FFN server and an OpenAI server that uses it."""

    def __init__(self, model: str, folder: Path, call_timeout: float) -> None:
        self.model = model
        self.endpoint = f"unix:{folder}/ffn.sock"
        self.port = free_port()
        self.start_ffn()
        env = {"AFD_ROLE": "attention", "AFD_FFN": self.endpoint, "AFD_CALL_TIMEOUT": str(call_timeout)}
        command = ("vllm.entrypoints.openai.api_server", "--model", model, "--port", str(self.port), *ENGINE_FLAGS)
        self.api = Process(*command, env=env)
        self.api.wait_for(lambda: self.health() == 200)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def start_ffn(self) -> None:
        command = ("afd_patch.serve", self.model, "--role", "ffn", "--listen", self.endpoint, *ENGINE_FLAGS)
        self.ffn = Process(*command)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stream(self, disturb: Callable[[], None] | None = None) -> str:
        """One long completion; ``disturb`` is called after its thirtieth token."""
        parts = []
        for number, part in enumerate(
            self.client.completions.create(model=self.model, prompt="import os", stream=True, **LONG)
        ):
            parts.append(part.choices[0].text)
            if number == 30 and disturb is not None:
                disturb()
        return "".join(parts)

    def destroy(self) -> None:
        self.api.destroy()
        self.ffn.destroy()


@pytest.fixture
def split(model: str, tmp_path: Path) -> Iterator[Callable[..., Split]]:
    started: list[Split] = []

    def start(call_timeout: float) -> Split:
        started.append(Split(model, tmp_path, call_timeout))
        return started[-1]

    yield start
    for deployment in started:
        deployment.destroy()


def test_killed_and_restarted_stopped_and_resumed(split: Callable[..., Split]) -> None:
    served = split(call_timeout=90)
    undisturbed = served.stream()
    assert len(undisturbed) > 400

    def kill_and_restart() -> None:
        served.ffn.destroy()
        served.start_ffn()

    assert served.stream(kill_and_restart) == undisturbed
    assert "repeating the call" in served.api.text()

    def stop_and_resume() -> None:
        served.ffn.signal(signal.SIGSTOP)
        time.sleep(2)
        served.ffn.signal(signal.SIGCONT)

    assert served.stream(stop_and_resume) == undisturbed

    # An attention process that dies leaves the server to the others.
    served.api.signal(signal.SIGKILL)
    served.ffn.wait_for(lambda: "left after" in served.ffn.text() or "dropped" in served.ffn.text())
    assert served.ffn.popen.poll() is None
    assert served.health() == 0


def test_stopped_for_ever(split: Callable[..., Split]) -> None:
    served = split(call_timeout=4)
    started = time.monotonic()
    with pytest.raises(openai.APIError):
        served.stream(lambda: served.ffn.signal(signal.SIGSTOP))
    assert time.monotonic() - started < 60
    deadline = time.monotonic() + 15
    while served.health() == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert served.health() != 200
    assert f"no FFN server at {served.endpoint} answered within 4 s" in served.api.text()
    served.ffn.signal(signal.SIGCONT)
