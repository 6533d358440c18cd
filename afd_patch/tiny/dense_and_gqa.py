"""Llama-like attention (grouped queries, q/k norms): dense models and the common mixtures of experts."""

from __future__ import annotations

from .architecture import EXPERTS, GQA, INTERMEDIATE, MOE_INTERMEDIATE, TOP_K, hf

ARCHITECTURES = (
    hf("llama", "dense Llama", "LlamaConfig", GQA, head_dim=64, intermediate_size=INTERMEDIATE),
    hf("qwen3", "dense Qwen3 (q/k norms)", "Qwen3Config", GQA, head_dim=64, intermediate_size=INTERMEDIATE),
    hf(
        "qwen3_moe",
        "Qwen3-MoE: 8 experts, top-2; layer 1 is dense",
        "Qwen3MoeConfig",
        GQA,
        head_dim=64,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=MOE_INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    hf(
        "qwen3_moe_231m",
        "Qwen3-MoE for benchmarks: 231 M parameters, hidden 1024, 8 layers, 16 experts, top-4",
        "Qwen3MoeConfig",
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        max_position_embeddings=4096,
        initializer_range=0.02,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    hf(
        "mixtral",
        "Mixtral: 8 experts, top-2 in every layer",
        "MixtralConfig",
        GQA,
        head_dim=64,
        intermediate_size=MOE_INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    ),
)
