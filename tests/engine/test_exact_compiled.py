"""Compiled mode: bit-identical too, and never somebody else's artefacts.

vLLM's compile cache does not know ``AFD_*``. Stock and AFD processes that share a cache directory must each really be
what they claim, whichever came first; counting remote calls shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engine.children import Child
from tests.engine.engines import PROMPTS, generate

LAYERS = 4
#: Every forward, and the one that compiles.
FORWARDS = 8 + 1


@pytest.mark.parametrize(
    ("architecture", "order"),
    [
        ("deepseek_v3", ("stock", "split")),
        ("qwen3_moe", ("split", "stock")),
    ],
)
def test_exact_and_separate(
    architecture: str,
    order: tuple[str, ...],
    checkpoint: Callable[..., str],
    serving: Callable[..., AbstractContextManager[Child]],
    attention: dict[str, str],
    tmp_path: Path,
) -> None:
    model = checkpoint(architecture)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environments = {"stock": cache, "split": {**cache, **attention}}
    calls = {"stock": 0, "split": LAYERS * FORWARDS}
    with serving(model, env=cache, enforce_eager=False):
        results = [
            Child(generate, model, PROMPTS, env=environments[side], enforce_eager=False).result() for side in order
        ]
    assert [result["calls"] for result in results] == [calls[side] for side in order]
    assert all(result["outputs"] == results[0]["outputs"] for result in results)


def test_mixed_modes_are_refused(
    checkpoint: Callable[..., str], serving: Callable[..., AbstractContextManager[Child]], attention: dict[str, str]
) -> None:
    """An eager FFN behind a compiled attention role would round differently."""
    model = checkpoint("qwen3_moe")
    with serving(model):
        kind, message = Child(generate, model, env=attention, enforce_eager=False).outcome()
    assert kind == "exit"
    assert "compiled: " in message
    assert "True" in message
    assert "False" in message
