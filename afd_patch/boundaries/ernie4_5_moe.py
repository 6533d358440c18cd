"""ERNIE 4.5 mixture of experts: dense layers and sparse ones with shared experts.

Checkpoints keep the router's correction bias in ``mlp.moe_statics``, and next-token-prediction modules beside the
layers, which the native loader leaves out (names with ``mtp``).
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_MODULE = "vllm.model_executor.models.ernie45_moe"

ERNIE4_5_MOE = Boundary(
    family="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    decoder=f"{_MODULE}:Ernie4_5_MoeDecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:Ernie4_5_MoeMLP",),
    moe=(f"{_MODULE}:Ernie4_5_MoeMoE",),
    router=Router(names=("gate", "moe_statics"), top_k="moe_k", shared="moe_num_shared_experts"),
    attention=(f"{_MODULE}:Ernie4_5_MoeAttention",),
    weights=WeightRules(unbuilt_modules=("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")),
    gate_in_float32=True,
)
