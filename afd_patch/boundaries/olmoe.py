"""OLMoE: every layer is a mixture of experts, without a shared one."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.olmoe"

OLMOE = Boundary(
    family="olmoe",
    architectures=("OlmoeForCausalLM",),
    decoder=f"{_MODULE}:OlmoeDecoderLayer",
    ffn_attribute="mlp",
    moe=(f"{_MODULE}:OlmoeMoE",),
    router=Router(),
    attention=(f"{_MODULE}:OlmoeAttention",),
)
