"""Qwen3 mixture of experts: dense layers (``mlp_only_layers``) and sparse ones cross alike."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.qwen3_moe"

QWEN3_MOE = Boundary(
    family="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    decoder=f"{_MODULE}:Qwen3MoeDecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:Qwen3MoeMLP",),
    moe=(f"{_MODULE}:Qwen3MoeSparseMoeBlock",),
    router=Router(shared="shared_expert_intermediate_size", shared_ending=("down_proj", "expert_gate")),
    attention=(f"{_MODULE}:Qwen3MoeAttention",),
)
