"""What is asked: rounds of prompts that reach one row, odd row counts, chunks, the prefix cache and sampling."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

#: Prompt lengths in tokens; the last one is replaced by the longest that fits.
LENGTHS = (1, 2, 3, 7, 16, 33, 64, 129, 0)
_SEED = 20_260_101


@dataclass(frozen=True)
class Round:
    """One call of ``LLM.generate``: a batch of token lists, and ``SamplingParams``."""

    name: str
    prompts: list[list[int]]
    sampling: dict[str, Any] = field(default_factory=dict)


def rounds(vocab_size: int, max_model_len: int, max_tokens: int) -> list[Round]:
    """The same rounds for the same arguments, always."""
    rng = random.Random(_SEED)
    longest = max(1, min(max_model_len - max_tokens - 8, 700))
    lengths = [min(length, longest) or longest for length in LENGTHS]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 3}
    return [
        Round("one request", prompts[4:5], greedy),
        Round("mixed lengths", prompts, greedy),
        Round("cached prefixes", [[*prompt[:longest], 5] for prompt in prompts], greedy),
        Round("two samples each", prompts[:4], {**greedy, "temperature": 0.8, "seed": 7, "n": 2}),
    ]
