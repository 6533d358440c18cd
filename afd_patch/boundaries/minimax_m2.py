"""MiniMax-M2: every layer is a mixture of experts, under ``block_sparse_moe``, whose router's bias is its own."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_MODULE = "vllm.model_executor.models.minimax_m2"

MINIMAX_M2 = Boundary(
    family="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    decoder=f"{_MODULE}:MiniMaxM2DecoderLayer",
    ffn_attribute="block_sparse_moe",
    moe=(f"{_MODULE}:MiniMaxM2MoE",),
    router=Router(names=("gate", "e_score_correction_bias")),
    attention=(f"{_MODULE}:MiniMaxM2Attention",),
    weights=WeightRules(ffn_children=("block_sparse_moe",)),
    gate_in_float32=True,
)
