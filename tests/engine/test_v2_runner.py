"""The V2 model runner gives the same bits through AFD; it is GPU vLLM's default.

It needs Triton. Here the Triton interpreter stands in for a CPU backend, which is all that the runner asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import ENGINE, GREEDY, PROMPTS

ENV = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def in_fresh_interpreter(model: str, needs: str = "") -> dict[str, Any]:
    """Triton is looked for when vLLM is imported, so the fork server's import comes too late."""
    import json
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.v2_runner", json.dumps([model, PROMPTS, ENGINE, GREEDY, needs])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "llama"])
def test_exact(
    architecture: str,
    checkpoint: Callable[..., str],
    serving: Callable[..., AbstractContextManager[Child]],
    attention: dict[str, str],
) -> None:
    model = checkpoint(architecture)
    with serving(model):
        split = Child(in_fresh_interpreter, model, env={**ENV, **attention}).result()
    stock = Child(in_fresh_interpreter, model, env=ENV).result()
    assert stock["runner"] == split["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert stock["calls"] == 0
    assert split["calls"] > 0
    assert split["outputs"] == stock["outputs"]
