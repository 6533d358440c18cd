"""Every further architecture with a table: bit-identical to stock vLLM, and without overlap of the roles.

Each case runs stock vLLM, the attention role against an FFN server, and the FFN role by itself.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.errors import WeightError
from tests.engine.children import Child
from tests.engine.cpu_help import buildable_sparse_attention, helped
from tests.engine.engines import ENGINE, PROMPTS, ask, build, ffn_server, generate, remote_calls
from tests.engine.test_ownership import assert_shared, describe, ffn_model, record_reads

ARCHITECTURES = (
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "ernie4_5_moe",
    "llama4",
    "step3_text",
    "qwen3_next",
    "minimax_m2",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "deepseek_v32",
    "glm_moe_dsa",
)
LAYERS = 4
#: Shared experts with a gate; a layer that adds two results. Compiled runs cost a minute each.
COMPILED = ("qwen2_moe", "step3_text")


def observe(path: str, **engine: Any) -> dict[str, Any]:
    """What an engine answers, and what it holds and has read."""
    read = record_reads()
    llm = build(path, **engine)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    result = describe(model, llm.llm_engine.vllm_config, read)
    return {**result, "outputs": ask(llm, PROMPTS), "calls": remote_calls()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_and_without_overlap(
    architecture: str, checkpoint: Any, endpoint: str, attention: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoint(architecture)
    server = Child(helped, architecture, ffn_server, path, endpoint)
    try:
        att = Child(helped, architecture, observe, path, env=attention).result()
    finally:
        server.stop()
    stock = Child(helped, architecture, observe, path).result()
    ffn = Child(helped, architecture, ffn_model, path, f"unix:{tmp_path}/other.sock").result()

    assert stock["calls"] == 0
    assert att["calls"] > 0 and att["calls"] % LAYERS == 0, "one call per layer"
    assert att["outputs"] == stock["outputs"]

    assert_shared(att["parameters"], ffn["parameters"], stock["parameters"])
    assert not set(att["read"]) & set(ffn["read"]), "no tensor is read by both"
    unread = set(stock["read"]) - set(att["read"]) - set(ffn["read"])
    assert all(name.startswith("model.visual.") for name in unread), "only a tower that nobody builds is left out"
    assert not att["moe layers"]
    assert ffn["moe layers"] == stock["moe layers"]
    assert sorted(att["registered"] + ffn["registered"]) == stock["registered"]


@pytest.mark.parametrize("architecture", COMPILED)
def test_exact_compiled(
    architecture: str, checkpoint: Any, endpoint: str, attention: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoint(architecture)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    server = Child(helped, architecture, ffn_server, path, endpoint, env=cache, enforce_eager=False)
    try:
        sides = [
            Child(helped, architecture, generate, path, env=env, enforce_eager=False)
            for env in ({**cache, **attention}, cache)
        ]
        split, stock = [side.result() for side in sides]
    finally:
        server.stop()
    assert split["outputs"] == stock["outputs"]
    assert split["calls"] > 0 and split["calls"] % LAYERS == 0


def ffn_outputs(path: str, endpoint: str) -> list[Any]:
    """What the FFN role computes in each layer for the same rows."""
    from vllm.engine.arg_utils import EngineArgs

    import afd_patch
    from afd_patch.ffn.runner import FFNRunner, configure

    afd_patch.activate(role="ffn", listen=endpoint)
    runner = FFNRunner(configure(EngineArgs(model=path, **ENGINE)))
    return [runner.compute_ffn_output(layer, rows()).tolist() for layer in runner.layers]


def native_outputs(path: str, **engine: Any) -> list[Any]:
    """What the native modules of a stock model compute in each layer for the same rows."""
    import torch
    from vllm.forward_context import set_forward_context

    llm = build(path, **engine)
    vllm_config = llm.llm_engine.vllm_config
    layers = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers
    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=len(rows())):
        return [layer.mlp(rows()).tolist() for layer in layers]


def rows() -> Any:
    import torch

    return torch.randn(37, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def loaded(path: str, help_first: Any) -> dict[str, Any]:
    """What a worker's model holds and has read; it is loaded and never runs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from afd_patch import plugin

    help_first()
    plugin.register()
    read = record_reads()
    vllm_config = EngineArgs(model=path, **ENGINE).create_engine_config()
    executor = UniProcExecutor(vllm_config)
    return describe(executor.driver_worker.worker.model_runner.model, vllm_config, read)


@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_as_it_is(
    architecture: str, checkpoint: Any, serving: Any, attention: dict[str, str], tmp_path: Path
) -> None:
    """With an unmodified configuration: the FFN role computes, the attention role is built, with its indexer."""
    path = checkpoint(architecture)
    other = f"unix:{tmp_path}/other.sock"
    native = Child(helped, architecture, native_outputs, path).result()
    assert Child(ffn_outputs, path, other).result() == native

    with serving(path):
        att = Child(loaded, path, buildable_sparse_attention, env=attention).result()
    ffn = Child(ffn_model, path, other).result()
    stock = Child(loaded, path, buildable_sparse_attention).result()
    assert any(".indexer." in name for name in att["parameters"])
    assert_shared(att["parameters"], ffn["parameters"], stock["parameters"])
    assert sorted(att["read"] + ffn["read"]) == sorted(stock["read"])
    assert sorted(att["registered"] + ffn["registered"]) == stock["registered"]


def reasons(
    architecture: str, mode: str = "NONE", quantization: str | None = None, multimodal: Any = None, gate: str = "ffn"
) -> list[str]:
    """Why ``architecture`` is refused in a compilation mode, with a quantisation and with other modalities."""
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization, multimodal_config=multimodal),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name=mode)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        kernel_config=SimpleNamespace(moe_backend="auto"),
    )
    return list(boundaries.find(architecture).refusals(vllm_config, gate))


def test_a_loader_that_needs_experts_is_refused() -> None:
    assert not reasons("GptOssForCausalLM")
    assert not reasons("GptOssForCausalLM", quantization="mxfp4")
    assert "quark" in reasons("GptOssForCausalLM", quantization="quark")[0]


def test_other_modalities_are_refused() -> None:
    """The tiny checkpoint has no image processor, so stock vLLM fails before an engine could show this."""
    name = "Qwen3_5MoeForConditionalGeneration"
    assert not reasons(name, multimodal=SimpleNamespace(language_model_only=True))
    assert reasons(name, multimodal=SimpleNamespace(language_model_only=False)) == [
        "only the language model can be split, not its other modalities; add --language-model-only"
    ]
    assert not reasons("Qwen3_5MoeForCausalLM"), "the text class has no other modalities"


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "MiniMaxM2ForCausalLM"])
def test_a_gate_that_reads_unrounded_rows_is_refused(architecture: str) -> None:
    assert not reasons(architecture)
    assert "--enforce-eager, or use AFD_GATE=attention" in reasons(architecture, "DYNAMO_TRACE_ONCE")[0]
    assert not reasons(architecture, "DYNAMO_TRACE_ONCE", gate="attention"), "there it reads them as stock vLLM does"


def test_a_sum_of_the_layer_itself_keeps_the_router_in_the_ffn_role() -> None:
    name = "Step3TextForCausalLM"
    assert not reasons(name, "NONE", gate="attention")
    assert not reasons(name, "DYNAMO_TRACE_ONCE", gate="ffn")
    (sentence,) = reasons(name, "DYNAMO_TRACE_ONCE", gate="attention")
    assert sentence.endswith("add --enforce-eager, or use AFD_GATE=ffn")


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("Qwen3_5MoeForConditionalGeneration", "model.language_model.layers.1.mlp.experts.gate_up_proj", "ffn"),
        ("Qwen3_5MoeForConditionalGeneration", "language_model.model.layers.1.mlp.shared_expert_gate.weight", "ffn"),
        ("Qwen3_5MoeForConditionalGeneration", "model.language_model.layers.1.linear_attn.A_log", "attention"),
        ("Qwen3_5MoeForConditionalGeneration", "model.language_model.norm.weight", "attention"),
        ("Qwen3_5MoeForConditionalGeneration", "model.visual.blocks.0.mlp.linear_fc1.weight", "none"),
        ("Qwen3_5MoeForConditionalGeneration", "mtp.layers.0.mlp.gate.weight", "none"),
        ("Qwen3_5MoeForCausalLM", "model.layers.1.mlp.gate.weight", "ffn"),
        ("Qwen3NextForCausalLM", "mtp.fc.weight", "none"),
        ("Ernie4_5_MoeForCausalLM", "model.layers.1.mlp.moe_statics.e_score_correction_bias", "ffn"),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_block.0.mlp.gate.weight", "none"),
        ("GptOssForCausalLM", "model.layers.1.mlp.experts.gate_up_proj_blocks", "ffn"),
        ("GptOssForCausalLM", "model.layers.1.mlp.router.bias", "ffn"),
        ("GptOssForCausalLM", "model.layers.1.self_attn.sinks", "attention"),
        ("Llama4ForCausalLM", "model.layers.1.feed_forward.experts.gate_up_proj", "ffn"),
        ("Step3TextForCausalLM", "model.layers.1.moe.gate_proj.weight", "ffn"),
        ("Step3TextForCausalLM", "model.layers.1.share_expert.up_proj.weight", "ffn"),
        ("DeepseekV32ForCausalLM", "model.layers.1.self_attn.indexer.wk.weight", "attention"),
        ("Glm4MoeForCausalLM", "model.layers.4.mlp.gate.weight", "none"),
    ],
)
def test_names_of_the_families(architecture: str, name: str, expected: str) -> None:
    assert boundaries.find(architecture).weights.owner(name, LAYERS) == expected


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Qwen3_5MoeForConditionalGeneration", "model.language_model.layers.1.mlq.gate.weight"),
        ("Qwen3_5MoeForConditionalGeneration", "model.audio.blocks.0.weight"),
        ("Llama4ForCausalLM", "model.layers.1.mlp.gate_proj.weight"),
        ("Qwen3NextForCausalLM", "model.visual.blocks.0.weight"),
        ("Step3TextForCausalLM", "model.layers.1.shared_expert.up_proj.weight"),
    ],
)
def test_unknown_names_of_the_families_are_quoted(architecture: str, name: str) -> None:
    with pytest.raises(WeightError, match="boundary table") as caught:
        boundaries.find(architecture).weights.owner(name, LAYERS)
    assert repr(name) in str(caught.value)
