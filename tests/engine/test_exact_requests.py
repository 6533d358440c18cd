"""Other kinds of requests than plain generation: structured output, embeddings, a KV cache from elsewhere, adapters."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import PROMPTS, ask, build, remote_calls

LAYERS = 4
Compared = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def compared(serving: Callable[..., AbstractContextManager[Child]], attention: dict[str, str]) -> Compared:
    """``compared(function, model, *args, **engine)``: what it gives on stock vLLM, and through AFD."""

    def run(function: Callable[..., Any], model: str, *args: Any, **engine: Any) -> tuple[Any, Any]:
        with serving(model, **engine):
            split = Child(function, model, *args, env=attention, **engine)
            stock = Child(function, model, *args, **engine).result()
            return stock, split.result()

    return run


def assert_equal(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, split = both
    assert stock["calls"] == 0
    assert split["calls"] > 0 and split["calls"] % LAYERS == 0
    assert split["outputs"] == stock["outputs"]


# ---------------------------------------------------------------- structured output

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = r"[ab]{3}-[0-9]{2}"


def structured(model: str, **engine: Any) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = build(model, **engine)
    outputs = []
    for constraint in ({"json": SCHEMA}, {"regex": REGEX}, {"choice": ["yes", "no"]}):
        sampling = SamplingParams(
            temperature=0.7,
            seed=5,
            max_tokens=40,
            logprobs=2,
            structured_outputs=StructuredOutputsParams(**constraint),  # type: ignore[arg-type]
        )
        for request in llm.generate(["Hello", "Tell me a story", "x y z"], sampling, use_tqdm=False):
            (o,) = request.outputs
            logprobs = [{token: p.logprob for token, p in step.items()} for step in o.logprobs or []]
            outputs.append((next(iter(constraint)), o.text, list(o.token_ids), logprobs))
    return {"outputs": outputs, "calls": remote_calls()}


def test_structured_output(checkpoint: Callable[..., str], compared: Compared) -> None:
    both = compared(structured, checkpoint("qwen3_moe"))
    assert_equal(both)
    texts = [(kind, text) for kind, text, *_ in both[1]["outputs"]]
    assert all(re.fullmatch(REGEX, text) for kind, text in texts if kind == "regex")
    assert all(text in ("yes", "no") for kind, text in texts if kind == "choice")


# ---------------------------------------------------------------- embeddings


def embeddings(model: str, **engine: Any) -> dict[str, Any]:
    llm = build(model, **engine)
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    return {"outputs": [list(o.outputs.embedding) for o in outputs], "calls": remote_calls()}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_embeddings(architecture: str, checkpoint: Callable[..., str], compared: Compared) -> None:
    """A generating model as an embedding model, which is what Qwen3 Embedding is."""
    both = compared(embeddings, checkpoint(architecture), runner="pooling", convert="embed")
    assert_equal(both)
    assert len({tuple(vector) for vector in both[1]["outputs"]}) == len(PROMPTS)


# ---------------------------------------------------------------- a KV cache from elsewhere

#: Longer than a block of vLLM's CPU cache, which is what the connector stores.
LONG = [
    {"prompt_token_ids": [(5 * n + 3 * i + i * i) % 500 + 3 for i in range(length)]}
    for n, length in ((1, 300), (2, 200))
]


def twice_with_a_folder(model: str, root: str, **engine: Any) -> dict[str, Any]:
    """The second time, a prompt's keys and values come from a folder, this side's own one in ``root``."""
    folder = tempfile.mkdtemp(dir=root, prefix=f"{os.environ.get('AFD_ROLE', 'stock')}-")
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    llm = build(model, kv_transfer_config=transfer, enable_prefix_caching=False, **engine)
    return {"outputs": [ask(llm, LONG), ask(llm, LONG)], "calls": remote_calls()}


def test_kv_transfer(checkpoint: Callable[..., str], compared: Compared, tmp_path: Path) -> None:
    """What both sides store is bit-identical too, so each can use what the other one stored."""
    assert_equal(compared(twice_with_a_folder, checkpoint("qwen3_moe"), str(tmp_path)))
    stored = [
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.safetensors")}
        for folder in (next(tmp_path.glob("stock-*")), next(tmp_path.glob("attention-*")))
    ]
    assert stored[0]
    assert stored[0] == stored[1]
