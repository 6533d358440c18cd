"""What the attention role keeps of embeddings and output head on CPUs, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import PROMPTS, ask, build

Serving = Callable[..., AbstractContextManager[Child]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def generate_and_look(model: str, **engine: Any) -> dict[str, Any]:
    """What is said, the elements that embeddings and head keep, and whether the embeddings have a kernel's copy."""
    from afd_patch.patches import vocabulary

    llm = build(model, **engine)
    module = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    embeddings, head = module.model.embed_tokens, module.lm_head
    outputs = ask(llm, PROMPTS)
    return {
        "outputs": outputs,
        "embeddings": embeddings.weight.numel(),
        "head": head.weight.numel(),
        "packed": embeddings.cpu_linear.__module__ != vocabulary.__name__,
    }


@pytest.mark.parametrize(
    ("engine", "head_is_read"),
    [
        ({}, False),
        ({"hf_overrides": {"tie_word_embeddings": True}}, False),
        ({"hf_overrides": {"head_dtype": "float32"}}, True),
        ({"speculative_config": NGRAM}, True),
    ],
    ids=["own head", "tied head", "head in float32", "speculation"],
)
def test_each_is_kept_once(
    engine: dict[str, Any],
    head_is_read: bool,
    checkpoint: Callable[..., str],
    serving: Serving,
    attention: dict[str, str],
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model, **engine):
        split = Child(generate_and_look, model, env=attention, **engine).result()
    stock = Child(generate_and_look, model, **engine).result()
    assert split["outputs"] == stock["outputs"]
    assert stock["packed"] and not split["packed"]
    assert split["embeddings"] == stock["embeddings"] == stock["head"] > 0
    assert split["head"] == (stock["head"] if head_is_read else 0)


def embeddings_as_head() -> dict[str, Any]:
    """Embeddings that a model multiplies with, packed by vLLM at once and by the patch at first use."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm, dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from afd_patch.config import AFDConfig
    from afd_patch.patches.construction import CURRENT_BUILD
    from afd_patch.patches.vocabulary import patches

    def layer() -> Any:
        made = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        nn.Module.__init__(made)
        made.weight = nn.Parameter(weight.clone(), requires_grad=False)
        return made

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 64, generator=generator, dtype=torch.bfloat16)
    rows = torch.randn(5, 64, generator=generator, dtype=torch.bfloat16)
    native, ours, other = layer(), layer(), layer()
    (patch,) = patches(AFDConfig.build(role="attention", ffn="unix:/ffn.sock"))
    pack = patch.make(dispatch_cpu_unquantized_gemm)
    dispatch_cpu_unquantized_gemm(native, remove_weight=False)
    pack(other, remove_weight=False)
    token = CURRENT_BUILD.set(object())  # type: ignore[arg-type]
    pack(ours, remove_weight=False)
    CURRENT_BUILD.reset(token)
    lazy = ours.cpu_linear
    expected = cpu_unquantized_gemm(native, rows, native.weight, None)
    said = [cpu_unquantized_gemm(ours, rows, ours.weight, None) for _ in range(2)]
    return {
        "equal": all(torch.equal(one, expected) for one in said),
        "replaced": ours.cpu_linear is not lazy and ours.cpu_linear.__module__ == native.cpu_linear.__module__,
        "kept": torch.equal(ours.weight, weight),
        "outside of a build": other.cpu_linear.__module__ == native.cpu_linear.__module__,
    }


def test_embeddings_as_head() -> None:
    seen = Child(embeddings_as_head).result()
    assert seen == {"equal": True, "replaced": True, "kept": True, "outside of a build": True}
