"""GLM-4 mixture of experts: the first layers are dense, the router's correction bias stays with its gate."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.glm4_moe"

GLM4_MOE = Boundary(
    family="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    decoder=f"{_MODULE}:Glm4MoeDecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:Glm4MoeMLP",),
    moe=(f"{_MODULE}:Glm4MoE",),
    router=Router(shared="n_shared_experts"),
    attention=(f"{_MODULE}:Glm4MoeAttention",),
    gate_in_float32=True,
)
