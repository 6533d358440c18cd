"""Qwen2 mixture of experts: dense layers and sparse ones, whose shared expert has a gate of its own; all cross."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.qwen2_moe"

QWEN2_MOE = Boundary(
    family="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    decoder=f"{_MODULE}:Qwen2MoeDecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:Qwen2MoeMLP",),
    moe=(f"{_MODULE}:Qwen2MoeSparseMoeBlock",),
    router=Router(shared="shared_expert_intermediate_size", shared_ending=("down_proj", "expert_gate")),
    attention=(f"{_MODULE}:Qwen2MoeAttention",),
)
