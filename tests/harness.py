"""Runs engines in forked children of a process that has imported vLLM once.

Importing vLLM takes 8 s and starting ``LLM`` in three processes 20 s; a forked child with an in-process engine starts
in 2 s. ``Child`` runs a function in such a child and brings back what it returns, raises or prints.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINE = dict(
    max_model_len=512,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    kv_cache_memory_bytes=64 << 20,
    enforce_eager=True,
    disable_log_stats=True,
    trust_remote_code=True,
)


def preload() -> None:
    """Import, in this process, what every engine needs; children inherit it."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


class Child:
    """``function(*args)`` in a forked process of its own group, with ``env`` added to its environment."""

    def __init__(self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> None:
        self.log = Path(tempfile.mkstemp(prefix="afd-test-", suffix=".log")[1])
        self._read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(write, function, args, env or {})
        os.close(write)
        self._done = False

    def _run(self, write: int, function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        log = os.open(self.log, os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(env)
        try:
            result: tuple[str, Any] = ("value", function(*args))
        except SystemExit as error:
            result = ("exit", str(error))
        except BaseException as error:  # the parent raises it again
            traceback.print_exc()
            result = ("error", f"{type(error).__name__}: {error}")
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def outcome(self, timeout: float = 180.0) -> tuple[str, Any]:
        """("value" | "exit" | "error", ...), once the function is over."""
        data, deadline = b"", time.monotonic() + timeout
        while True:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise TimeoutError(f"no result within {timeout} s\n{self.text()}")
            part = os.read(self._read, 1 << 20)
            if not part:
                break
            data += part
        self._reap()
        if not data:
            return ("error", f"the child died\n{self.text()}")
        return pickle.loads(data)  # our own child

    def result(self, timeout: float = 180.0) -> Any:
        """What the function returned; raises ``ChildFailed`` otherwise."""
        kind, value = self.outcome(timeout)
        if kind != "value":
            raise ChildFailed(f"{value}\n{self.text()[-6000:]}")
        return value

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self._done:
            os.killpg(self.pid, number)
            if number == signal.SIGKILL:
                self._reap()

    def _reap(self) -> None:
        if not self._done:
            os.waitpid(self.pid, 0)
            self._done = True


class ChildFailed(AssertionError):
    pass


def ffn_server(model: str, endpoint: str, **engine: Any) -> Any:
    """The FFN role, in this process, until SIGTERM."""
    from afd_patch.ffn.main import run_ffn_server

    return run_ffn_server(model, endpoint, {**ENGINE, **engine})


def generate(
    model: str, prompts: list[Any], *, role: bool = False, sampling: dict[str, Any] | None = None, **engine: Any
) -> dict[str, Any]:
    """Tokens and logprobs of ``prompts``; with ``role``, through the FFN server that ``AFD_FFN`` names."""
    from afd_patch import plugin

    if role:
        os.environ["AFD_ROLE"] = "attention"
    plugin.register()
    from vllm import LLM, SamplingParams

    llm = LLM(model, **{**ENGINE, **engine})
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True, **(sampling or {})})
    outputs = llm.generate(prompts, params, use_tqdm=False)
    from afd_patch.attention import connections

    return {
        "outputs": [
            [
                (list(o.token_ids), [{t: p.logprob for t, p in step.items()} for step in o.logprobs or []])
                for o in request.outputs
            ]
            for request in outputs
        ],
        "calls": sum(entry[1].calls for entry in connections._connectors.values()),
    }
