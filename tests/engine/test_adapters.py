"""LoRA: adapters of attention projections are exact; those that change an FFN are refused when they are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import GREEDY, PROMPTS, ask, build, remote_calls

LAYERS = 4
RANK = 8
ATTENTION = r"self_attn\.[qkvo]_proj"
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
Adapter = Callable[[str, str], str]


def make_adapter(model: str, folder: str, modules: str, seed: int) -> None:
    """An adapter of random weights for every module of ``model`` whose name ``modules`` finds."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(f"{model}/model.safetensors").items():
        if re.search(modules + r"\.weight$", name):
            module = "base_model.model." + name.removesuffix(".weight")
            a, b = (RANK, weight.shape[1]), (weight.shape[0], RANK)
            tensors[f"{module}.lora_A.weight"] = torch.randn(a, generator=generator) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(b, generator=generator) * 0.1
    assert tensors
    Path(folder).mkdir()
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    def make(model: str, modules: str) -> str:
        folder = tmp_path / f"adapter{len(list(tmp_path.glob('adapter*')))}"
        Child(make_adapter, model, str(folder), modules, len(list(tmp_path.iterdir()))).result()
        return str(folder)

    return make


def with_adapters(model: str, adapters: list[str], **engine: Any) -> dict[str, Any]:
    """Requests without an adapter and with each of ``adapters``, in one batch; and all of them without."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm = build(model, **engine)
    known = [None, *(LoRARequest(path, number, path) for number, path in enumerate(adapters, 1))]
    requests = [known[number % len(known)] for number in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False, lora_request=requests)
    mixed = [
        (list(o.token_ids), [{token: p.logprob for token, p in step.items()} for step in o.logprobs or []])
        for request in outputs
        for o in request.outputs
    ]
    return {"outputs": [mixed, ask(llm, PROMPTS)], "calls": remote_calls()}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_attention_projections(
    architecture: str,
    checkpoint: Callable[..., str],
    adapter: Adapter,
    serving: Callable[..., AbstractContextManager[Child]],
    attention: dict[str, str],
) -> None:
    """Both roles get the flags."""
    model = checkpoint(architecture)
    adapters = [adapter(model, ATTENTION), adapter(model, r"self_attn\.[qo]_proj")]
    with serving(model, **LORA):
        split = Child(with_adapters, model, adapters, env=attention, **LORA)
        stock = Child(with_adapters, model, adapters, **LORA).result()
        result = split.result()
    assert result["outputs"] == stock["outputs"]
    assert result["calls"] > 0 and result["calls"] % LAYERS == 0
    mixed, plain = result["outputs"]
    assert [a == b for a, b in zip(mixed, plain, strict=True)] != [True] * len(PROMPTS), "adapters change something"


def refusal(model: str, adapters: list[str]) -> dict[str, Any]:
    """What loading each of ``adapters`` says; the engine serves on."""
    from vllm.lora.request import LoRARequest

    from afd_patch.errors import AFDError

    llm = build(model, **LORA)
    said = []
    for number, path in enumerate(adapters, 1):
        try:
            llm.llm_engine.add_lora(LoRARequest(f"mine{number}", number, path))
        except (AFDError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "answers": len(ask(llm, PROMPTS))}


def test_an_adapter_of_an_ffn_is_refused(
    checkpoint: Callable[..., str],
    adapter: Adapter,
    serving: Callable[..., AbstractContextManager[Child]],
    attention: dict[str, str],
) -> None:
    model = checkpoint("llama")
    adapters = [adapter(model, r"mlp\.down_proj"), adapter(model, r"_proj")]
    with serving(model, **LORA):
        result = Child(refusal, model, adapters, env=attention).result()
    assert len(result["said"]) == 2
    for number, sentence in enumerate(result["said"], 1):
        assert sentence.startswith(f"UnsupportedError: LoRA adapter 'mine{number}' changes modules of the FFN role")
        assert ".mlp." in sentence
        assert "self_attn" not in sentence
        assert sentence.endswith("use one that changes attention projections only")
    assert result["answers"] == len(PROMPTS)
