"""DeepSeek V1 to V3 and the sparse-attention models built like V3. Layer 0 is dense (sparse attention: 1 too)."""

from __future__ import annotations

from typing import Any

from .architecture import (
    COMMON,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    MLA,
    MOE_INTERMEDIATE,
    TOP_K,
    VOCAB,
    Architecture,
    Options,
    hf,
)
from .checkpoint import Checkpoint

_MOE: dict[str, Any] = {
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_V3: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
# transformers does not save the first two, but vLLM reads them; the third says that no drafter is included.
_V3_EXTRA: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
_DSA: dict[str, Any] = {
    "q_lora_rank": 128,
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "first_k_dense_replace": 2,
}
# Saved as a list of layer types only; vLLM reads the number.
_DSA_EXTRA: dict[str, Any] = dict(_V3_EXTRA, first_k_dense_replace=2)

_V1_CONFIGURATION = '''\
"""Configuration of DeepSeek V1, which transformers does not have."""

from transformers.configuration_utils import PretrainedConfig


class DeepseekConfig(PretrainedConfig):
    model_type = "deepseek"
    keys_to_ignore_at_inference = ["past_key_values"]
'''


def _deepseek_v1(seed: int, options: Options) -> Checkpoint:
    """Written by hand: transformers has no DeepseekForCausalLM, so the configuration comes as code."""
    from .random_weights import RandomTensors

    tensors = RandomTensors(seed)
    tensors.linear("model.embed_tokens.weight", VOCAB, HIDDEN)
    tensors.linear("lm_head.weight", VOCAB, HIDDEN)
    tensors.vector("model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            tensors.linear(f"{prefix}.self_attn.{part}_proj.weight", HIDDEN, HIDDEN)
        tensors.vector(f"{prefix}.input_layernorm.weight", HIDDEN)
        tensors.vector(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        if layer == 0:
            tensors.mlp(f"{prefix}.mlp", HIDDEN, INTERMEDIATE)
            continue
        tensors.linear(f"{prefix}.mlp.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            tensors.mlp(f"{prefix}.mlp.experts.{expert}", HIDDEN, MOE_INTERMEDIATE)
        tensors.mlp(f"{prefix}.mlp.shared_experts", HIDDEN, 2 * MOE_INTERMEDIATE)
    config = dict(
        COMMON,
        architectures=["DeepseekForCausalLM"],
        model_type="deepseek",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekConfig"},
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_layer_freq=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        torch_dtype="bfloat16",
        **dict(_MOE, n_shared_experts=2),
    )
    return Checkpoint(config, tensors, {"configuration_deepseek.py": _V1_CONFIGURATION})


ARCHITECTURES = (
    Architecture(
        "deepseek_v1",
        "DeepSeek V1: multi-head attention, two shared experts; start vLLM with --trust-remote-code",
        _deepseek_v1,
    ),
    hf(
        "deepseek_v2",
        "DeepSeek V2-Lite: MLA, greedy top-k, one shared expert",
        "DeepseekV2Config",
        MLA,
        _MOE,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    ),
    hf(
        "deepseek_v2_qlora",
        "DeepSeek V2: MLA with q_lora_rank, top-k limited to groups, scaled experts",
        "DeepseekV2Config",
        MLA,
        _MOE,
        q_lora_rank=128,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    ),
    hf(
        "deepseek_v3",
        "DeepSeek V3, R1, Kimi K2: sigmoid router with correction bias, groups, q_lora_rank",
        "DeepseekV3Config",
        MLA,
        _MOE,
        _V3,
        q_lora_rank=128,
        extra=_V3_EXTRA,
    ),
    hf(
        "deepseek_v3_noqlora",
        "DeepSeek V3 without q_lora_rank (Moonlight)",
        "DeepseekV3Config",
        MLA,
        _MOE,
        _V3,
        q_lora_rank=None,
        extra=_V3_EXTRA,
    ),
    hf(
        "deepseek_v32",
        "DeepSeek V3.2: sparse attention (index_topk 64); not on stock vLLM for CPU",
        "DeepseekV32Config",
        MLA,
        _MOE,
        _V3,
        _DSA,
        extra=_DSA_EXTRA,
    ),
    hf(
        "glm_moe_dsa",
        "GLM with sparse attention (index_topk 64); not on stock vLLM for CPU",
        "GlmMoeDsaConfig",
        MLA,
        _MOE,
        dict(_V3, n_group=1, topk_group=1),
        _DSA,
        extra=_DSA_EXTRA,
    ),
)
