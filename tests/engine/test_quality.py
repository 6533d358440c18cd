"""Not only equal, but right: a real mixture of experts answers in English through AFD."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.engine.children import Child
from tests.engine.engines import build, remote_calls

#: Questions that stock SmolLM2-135M-Instruct, greedy, answers rightly.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is 2+3?": "5",
    "What colour is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
}


def chat(model: str, questions: list[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = build(model, max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    answers = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    return {"answers": [answer.outputs[0].text for answer in answers], "calls": remote_calls()}


def test_real_answers(
    checkpoint: Callable[..., str],
    serving: Callable[..., AbstractContextManager[Child]],
    attention: dict[str, str],
) -> None:
    model = checkpoint("smollm2-moe")
    with serving(model, max_model_len=1024):
        split = Child(chat, model, list(QUESTIONS), env=attention).result()
    stock = Child(chat, model, list(QUESTIONS)).result()
    assert split["answers"] == stock["answers"]
    assert split["calls"] > 0
    for (question, expected), answer in zip(QUESTIONS.items(), split["answers"], strict=True):
        assert expected.lower() in answer.lower(), f"{question} -> {answer}"
