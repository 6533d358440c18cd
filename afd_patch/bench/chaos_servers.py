"""What ``bench chaos`` disturbs: a vLLM deployment with an OpenAI server, or connectors alone with a small FFN.

Both have one FFN server that can be killed, stopped and started again, and a source of tokens for the streams.
"""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from afd_patch.bench.chaos_streams import Source
from afd_patch.bench.processes import Group, environment
from afd_patch.bench.report import divide
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.hosting import free_port
from afd_patch.serve.launcher import READY

TOKENS = 48
_PROMPT_TOKENS = 24
_FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--no-enable-prefix-caching")


class FFNProcess:
    """The FFN server under test: ``arguments`` start it, ``ready`` is in its output when it answers."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: Path, ready: str) -> None:
        self._command = (arguments, env, log)
        self._ready = ready
        self._group = self._spawn()

    def _spawn(self) -> Group:
        arguments, env, log = self._command
        return Group("the FFN server", arguments, env, log)

    def wait_ready(self) -> None:
        self._group.wait_for(self._ready)

    def signal(self, number: int) -> None:
        self._group.signal(number)

    def kill(self) -> None:
        self._group.kill()

    def restart(self) -> None:
        self._group = self._spawn()


class VLLMDeployment:
    """``python -m afd_patch.serve`` twice: the FFN role at ``endpoint``, the attention role connected to ``front``.

    The OpenAI server takes one request at a time, so that every request is a batch of its own and its tokens can be
    compared: tokens of a model depend on what else is in the batch.
    """

    def __init__(
        self, model: Path, endpoint: Endpoint, front: Endpoint, folder: Path, flags: Sequence[str], timeout: float
    ) -> None:
        attention, ffn = divide(None)
        every = {"AFD_CALL_TIMEOUT": str(timeout), "AFD_CONNECT_TIMEOUT": "600"}
        command = ["afd_patch.serve", str(model)]
        self.ffn = FFNProcess(
            [*command, "--role", "ffn", "--listen", str(endpoint), *_FLAGS, *flags],
            environment(**every, VLLM_CPU_OMP_THREADS_BIND=ffn), folder / "ffn.log", READY,
        )  # fmt: skip
        self._url = f"http://127.0.0.1:{free_port()}"
        self._model = str(model)
        self._timeout = timeout
        port = self._url.rpartition(":")[2]
        self._api = Group(
            "the OpenAI server",
            [*command, "--role", "attention", "--ffn", str(front), "--port", port, "--host", "127.0.0.1",
             "--max-num-seqs", "1", *_FLAGS, *flags],
            environment(**every, VLLM_CPU_OMP_THREADS_BIND=attention), folder / "api.log",
        )  # fmt: skip

    def wait_ready(self) -> None:
        self.ffn.wait_ready()
        self._api.wait_for("Application startup complete")

    def source(self, stream: int) -> Source:
        return self._stream

    def _stream(self, prompt: int) -> Iterator[int]:
        rng = random.Random(prompt)
        body = {
            "model": self._model, "prompt": [rng.randrange(3, 200) for _ in range(_PROMPT_TOKENS)],
            "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10 * self._timeout) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                content = json.loads(line.removeprefix(b"data: "))
                if "choices" not in content:
                    raise ConnectionError(f"the stream reported {json.dumps(content)[:300]}")
                for choice in content["choices"]:
                    yield from choice.get("token_ids") or []

    def close(self) -> None:
        if self._api.running:
            os.kill(self._api.pid, signal.SIGTERM)  # only the first process: it ends its own
        self._api.end()
        self.ffn.signal(signal.SIGCONT)
        self.ffn.kill()


class SmallDeployment:
    """The same without vLLM: every stream has a connector of its own, and runs a model of a few small layers."""

    def __init__(self, endpoint: Endpoint, front: Endpoint, folder: Path, timeout: float) -> None:
        self._front = front
        self._timeout = timeout
        self._connectors: list[Any] = []
        self.ffn = FFNProcess(
            ["afd_patch.bench.small_model", str(endpoint)], dict(os.environ), folder / "ffn.log", "ready"
        )

    def wait_ready(self) -> None:
        self.ffn.wait_ready()

    def source(self, stream: int) -> Source:
        from afd_patch.bench import small_model

        connector = small_model.connect(self._front, self._timeout)
        self._connectors.append(connector)
        return lambda prompt: small_model.generate(connector, prompt, TOKENS)

    def close(self) -> None:
        self.ffn.signal(signal.SIGCONT)
        self.ffn.kill()
        for connector in self._connectors:
            connector.close()
