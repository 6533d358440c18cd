"""What vLLM's scheduler does on the attention side leaves AFD exact: equal batches give equal bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import ask, build, remote_calls

BothWays = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(11 * seed + 5 * i + i * i) % 500 + 3 for i in range(length)]}


def assert_equal(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, split = both
    assert stock["calls"] == 0
    assert split["calls"] > 0
    assert split["outputs"] == stock["outputs"]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_chunked_prefill_mixed_with_decode(
    architecture: str, checkpoint: Callable[..., str], both_ways: BothWays
) -> None:
    """Prompts longer than a chunk, so prefill chunks share batches with decodes."""
    prompts = [prompt(300, 1), prompt(5, 2), prompt(131, 3), prompt(1, 4), prompt(200, 5)]
    assert_equal(both_ways(checkpoint(architecture), prompts, max_num_batched_tokens=64, max_num_seqs=4))


def test_prefix_caching(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    first = [prompt(160, 1), prompt(96, 2)]
    longer = [{"prompt_token_ids": p["prompt_token_ids"] + [9, 8, 7]} for p in first]
    assert_equal(both_ways(checkpoint("qwen3_moe"), [first, longer, first], enable_prefix_caching=True))


def test_ngram_speculation(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    repeating = [{"prompt_token_ids": [5, 6, 7, 8] * 12}, {"prompt_token_ids": [9, 4] * 9}]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert_equal(both_ways(checkpoint("qwen3_moe"), repeating, {"max_tokens": 20}, speculative_config=speculation))


def test_several_samples(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    sampling = {"n": 3, "temperature": 0.9, "seed": 11, "top_p": 0.95}
    assert_equal(both_ways(checkpoint("mixtral"), [prompt(9, 1), prompt(30, 2)], sampling))


def test_many_different_requests(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    """24 at once, more than run at a time."""
    prompts = [prompt(1 + 13 * n % 97, n) for n in range(24)]
    assert_equal(both_ways(checkpoint("deepseek_v2"), prompts, max_num_seqs=16))


def test_fp8_kv_cache(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    assert_equal(both_ways(checkpoint("qwen3_moe"), kv_cache_dtype="fp8"))


def test_dummy_weights(checkpoint: Callable[..., str], both_ways: BothWays) -> None:
    """vLLM fills each tensor from the same seed, so two halves of a model get the weights of the whole."""
    assert_equal(both_ways(checkpoint("deepseek_v3"), load_format="dummy"))


def with_aborts(model: str, **engine: Any) -> dict[str, Any]:
    """Requests are aborted while others go on; what is left must not notice."""
    from vllm import SamplingParams

    llm = build(model, **engine)
    core = llm.llm_engine
    for n in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        core.add_request(str(n), prompt(10 + 7 * n, n), params)
    outputs: dict[str, Any] = {}
    for step in range(200):
        if step == 4:
            core.abort_request(["1", "4"])
        for request in core.step():
            if request.finished:
                o = request.outputs[0]
                outputs[request.request_id] = (list(o.token_ids), o.cumulative_logprob)
        if not core.has_unfinished_requests():
            break
    return {"outputs": outputs, "calls": remote_calls()}


def test_aborts_in_mid_flight(
    checkpoint: Callable[..., str], serving: Callable[..., AbstractContextManager[Child]], attention: dict[str, str]
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        split = Child(with_aborts, model, env=attention)
        stock = Child(with_aborts, model).result()
        assert_equal((stock, split.result()))
    assert len(stock["outputs"]) >= 4


def two_models(model: str, other: str, **engine: Any) -> dict[str, Any]:
    """Two engines of one process, asked in turn."""
    first, second = build(model, **engine), build(other or model, **engine)
    prompts = [prompt(12, 1), prompt(40, 2)]
    return {"outputs": [ask(first, prompts), ask(second, prompts), ask(first, prompts)], "calls": remote_calls()}


def test_two_engines_in_one_process(
    checkpoint: Callable[..., str], serving: Callable[..., AbstractContextManager[Child]], attention: dict[str, str]
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        split = Child(two_models, model, "", env=attention).result()
    stock = Child(two_models, model, "").result()
    assert_equal((stock, split))
