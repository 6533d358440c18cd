"""Mixtral: every layer is a mixture of experts, under ``block_sparse_moe``."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_MODULE = "vllm.model_executor.models.mixtral"

MIXTRAL = Boundary(
    family="mixtral",
    architectures=("MixtralForCausalLM",),
    decoder=f"{_MODULE}:MixtralDecoderLayer",
    ffn_attribute="block_sparse_moe",
    moe=(f"{_MODULE}:MixtralMoE",),
    router=Router(),
    attention=(f"{_MODULE}:MixtralAttention",),
    weights=WeightRules(ffn_children=("block_sparse_moe",)),
)
