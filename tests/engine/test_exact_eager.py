"""Eager mode: tokens and logprobs through AFD are those of stock vLLM, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from afd_patch.hosting import free_port
from tests.engine.children import Child
from tests.engine.engines import PROMPTS, ffn_server, generate

ARCHITECTURES = (
    "qwen3_moe",
    "deepseek_v1",
    "deepseek_v2",
    "deepseek_v2_qlora",
    "deepseek_v3",
    "deepseek_v3_noqlora",
    "mixtral",
    "llama",
    "qwen3",
)
LAYERS = 4


def assert_exact(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, split = both
    assert stock["calls"] == 0
    assert split["calls"] > 0
    assert split["calls"] % LAYERS == 0
    assert split["outputs"] == stock["outputs"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16(architecture: str, checkpoint: Callable[..., str], both_ways: Callable[..., Any]) -> None:
    assert_exact(both_ways(checkpoint(architecture)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "llama"])
def test_other_dtypes(
    architecture: str, dtype: str, checkpoint: Callable[..., str], both_ways: Callable[..., Any]
) -> None:
    assert_exact(both_ways(checkpoint(architecture), dtype=dtype))


def test_one_call_per_layer_and_forward(checkpoint: Callable[..., str], both_ways: Callable[..., Any]) -> None:
    _, split = both_ways(checkpoint("qwen3_moe"), [{"prompt_token_ids": [5, 6, 7]}], {"max_tokens": 5})
    assert split["calls"] == LAYERS * 5


def test_attention_processes_share_a_server(
    checkpoint: Callable[..., str], attention: dict[str, str], serving: Callable[..., AbstractContextManager[Child]]
) -> None:
    """Three at once, each with its own row counts."""
    model = checkpoint("deepseek_v3")
    batches = [PROMPTS[:1], PROMPTS[1:4], PROMPTS]
    with serving(model):
        split = [Child(generate, model, batch, {"max_tokens": 24}, env=attention) for batch in batches]
        results = [child.result() for child in split]
    for batch, result in zip(batches, results, strict=True):
        assert_exact((Child(generate, model, batch, {"max_tokens": 24}).result(), result))


def test_over_tcp(checkpoint: Callable[..., str], attention: dict[str, str]) -> None:
    """The rows travel in the stream instead of in shared memory."""
    model, endpoint = checkpoint("qwen3_moe"), f"tcp://127.0.0.1:{free_port()}"
    server = Child(ffn_server, model, endpoint)
    try:
        split = Child(generate, model, env={**attention, "AFD_FFN": endpoint})
        assert_exact((Child(generate, model).result(), split.result()))
    finally:
        server.stop()
