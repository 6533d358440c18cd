"""Further architectures: hybrid attention, other routers, sinks, stacked experts."""

from __future__ import annotations

from typing import Any

from .architecture import (
    COMMON,
    EXPERTS,
    GQA,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    MAX_POSITIONS,
    MOE_INTERMEDIATE,
    TOP_K,
    VOCAB,
    Architecture,
    Options,
    hf,
)
from .checkpoint import Checkpoint

_GATED_DELTA_NET: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_QWEN_MOE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "shared_expert_intermediate_size": MOE_INTERMEDIATE,
}
_QWEN_3_5: dict[str, Any] = dict(
    **GQA,
    **_GATED_DELTA_NET,
    **_QWEN_MOE,
    rms_norm_eps=1e-6,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
)


def _qwen3_5_moe(seed: int, options: Options) -> Checkpoint:
    """With a vision tower; the ids of its special tokens are fillers of the tiny tokenizer."""
    from transformers import Qwen3_5MoeTextConfig

    from .random_weights import from_transformers

    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
    }
    config = {
        "text_config": Qwen3_5MoeTextConfig(**COMMON, **_QWEN_3_5).to_dict(),
        "vision_config": vision,
        "vision_start_token_id": 506,
        "vision_end_token_id": 507,
        "image_token_id": 508,
        "video_token_id": 509,
        "tie_word_embeddings": False,
    }
    return from_transformers("Qwen3_5MoeConfig", config, seed=seed, model_class="Qwen3_5MoeForConditionalGeneration")


def _step3_text(seed: int, options: Options) -> Checkpoint:
    """Written by hand: one tensor holds all experts, attention shares one key-value head (MFA)."""
    from .random_weights import RandomTensors

    tensors = RandomTensors(seed)
    head, shared_q, heads = 64, 128, 4
    tensors.linear("model.embed_tokens.weight", VOCAB, HIDDEN)
    tensors.linear("lm_head.weight", VOCAB, HIDDEN)
    tensors.vector("model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        tensors.linear(f"{attention}.q_proj.weight", shared_q, HIDDEN)
        tensors.linear(f"{attention}.k_proj.weight", head, HIDDEN)
        tensors.linear(f"{attention}.v_proj.weight", head, HIDDEN)
        tensors.linear(f"{attention}.wq.weight", heads * head, shared_q)
        tensors.linear(f"{attention}.o_proj.weight", HIDDEN, heads * head)
        tensors.vector(f"{attention}.inter_norm.weight", shared_q)
        tensors.vector(f"{prefix}.input_layernorm.weight", HIDDEN)
        tensors.vector(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        if layer == 0:
            tensors.mlp(f"{prefix}.mlp", HIDDEN, INTERMEDIATE)
            continue
        tensors.linear(f"{prefix}.moe.gate.weight", EXPERTS, HIDDEN)
        tensors.linear(f"{prefix}.moe.gate_proj.weight", EXPERTS, MOE_INTERMEDIATE, HIDDEN)
        tensors.linear(f"{prefix}.moe.up_proj.weight", EXPERTS, MOE_INTERMEDIATE, HIDDEN)
        tensors.linear(f"{prefix}.moe.down_proj.weight", EXPERTS, HIDDEN, MOE_INTERMEDIATE)
        tensors.mlp(f"{prefix}.share_expert", HIDDEN, MOE_INTERMEDIATE)
    config = dict(
        COMMON,
        architectures=["Step3TextForCausalLM"],
        model_type="step3_text",
        intermediate_size=INTERMEDIATE,
        num_attention_heads=heads,
        num_attention_groups=1,
        head_dim=head,
        share_q_dim=shared_q,
        max_seq_len=MAX_POSITIONS,
        max_position_embedding=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        moe_intermediate_size=MOE_INTERMEDIATE,
        moe_num_experts=EXPERTS,
        moe_top_k=TOP_K,
        moe_layers_enum="1,2,3",
        share_expert_dim=MOE_INTERMEDIATE,
        norm_expert_weight=True,
        torch_dtype="bfloat16",
    )
    return Checkpoint(config, tensors)


ARCHITECTURES = (
    Architecture(
        "qwen3_5_moe",
        "Qwen3.5-MoE with vision tower: hybrid attention, gated shared expert; needs torchvision",
        _qwen3_5_moe,
    ),
    hf("qwen3_5_moe_text", "Qwen3.5-MoE, text only; needs torchvision", "Qwen3_5MoeTextConfig", _QWEN_3_5),
    hf(
        "qwen3_next",
        "Qwen3-Next: hybrid attention, gated shared expert; layer 0 is dense",
        "Qwen3NextConfig",
        GQA,
        _GATED_DELTA_NET,
        _QWEN_MOE,
        intermediate_size=INTERMEDIATE,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    hf(
        "qwen2_moe",
        "Qwen2-MoE: gated shared expert, attention biases; layer 0 is dense",
        "Qwen2MoeConfig",
        GQA,
        _QWEN_MOE,
        intermediate_size=INTERMEDIATE,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
    ),
    hf(
        "glm4_moe",
        "GLM-4-MoE: sigmoid router with correction bias, shared expert; layer 0 is dense",
        "Glm4MoeConfig",
        GQA,
        head_dim=64,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=MOE_INTERMEDIATE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        use_qk_norm=True,
    ),
    hf(
        "gpt_oss",
        "gpt-oss: sliding windows, attention sinks, biases in router and experts",
        "GptOssConfig",
        GQA,
        head_dim=64,
        intermediate_size=256,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 32,
        },
    ),
    hf(
        "olmoe",
        "OLMoE: multi-head attention, q/k norms",
        "OlmoeConfig",
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=MOE_INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    ),
    hf(
        "llama4",
        "Llama 4 text: chunked attention, top-1, every second layer has experts",
        "Llama4TextConfig",
        GQA,
        model_class="Llama4ForCausalLM",
        head_dim=64,
        intermediate_size=MOE_INTERMEDIATE,
        intermediate_size_mlp=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=256,
    ),
    hf(
        "minimax_m2",
        "MiniMax-M2: sigmoid router with correction bias; its router needs help on stock vLLM for CPU",
        "MiniMaxM2Config",
        GQA,
        head_dim=64,
        intermediate_size=MOE_INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        extra={
            "rotary_dim": 64,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rope_theta": 10000.0,
        },
    ),
    hf(
        "ernie4_5_moe",
        "Ernie 4.5 MoE: correction bias, two shared experts; layer 0 is dense",
        "Ernie4_5_MoeConfig",
        GQA,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=MOE_INTERMEDIATE,
        moe_num_experts=EXPERTS,
        moe_k=TOP_K,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=LAYERS - 1,
        moe_layer_interval=1,
    ),
    Architecture("step3_text", "Step-3 text: MFA attention, stacked expert tensors; layer 0 is dense", _step3_text),
)
