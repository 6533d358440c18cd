"""Speculative decoding with models: what drafts is on the attention side and keeps its own FFN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LAYERS = 4
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8] * 6}, {"prompt_token_ids": [9, 4] * 9}, {"prompt_token_ids": [3]}]


@pytest.mark.parametrize(
    ("architecture", "method", "drafter"),
    [
        ("qwen3_moe", "draft_model", "qwen3_moe"),
        ("qwen3_moe", "draft_model", "llama"),
        ("qwen3_moe", "eagle", "eagle"),
        ("qwen3_moe", "eagle3", "eagle3"),
        ("deepseek_v3_mtp", "mtp", None),
    ],
)
def test_exact(
    architecture: str, method: str, drafter: str | None, checkpoint: Callable[..., str], both_ways: Callable[..., Any]
) -> None:
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if drafter is not None:
        speculation["model"] = checkpoint(drafter)
    stock, split = both_ways(checkpoint(architecture), PROMPTS, {"max_tokens": 16}, speculative_config=speculation)
    assert stock["calls"] == 0
    assert split["calls"] > 0 and split["calls"] % LAYERS == 0
    assert split["outputs"] == stock["outputs"]
