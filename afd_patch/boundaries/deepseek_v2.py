"""DeepSeek V1, V2, V3 (and Kimi-K2, whose architecture is V3's), V3.2 and GLM-DSA: one native implementation.

The decoder layer tests ``isinstance(self.mlp, DeepseekV2MLP)`` in every forward to scale fp16 outputs, and
``isinstance(self.self_attn, DeepseekAttention)``; stand-ins keep both true where they were true.

Sparse attention (V3.2, GLM-DSA) adds an indexer below ``self_attn`` and changes nothing on the FFN side. On CUDA and
ROCm vLLM builds these two from decoder layers of its own (``vllm.models.deepseek_v32``), which this table does not
know, so a model that is built there is refused.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.deepseek_v2"

DEEPSEEK_V2 = Boundary(
    family="deepseek_v2",
    architectures=(
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
    ),
    decoder=f"{_MODULE}:DeepseekV2DecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:DeepseekV2MLP",),
    moe=(f"{_MODULE}:DeepseekV2MoE",),
    router=Router(shared="n_shared_experts"),
    attention=(
        f"{_MODULE}:DeepseekAttention",
        f"{_MODULE}:DeepseekV2Attention",
        f"{_MODULE}:DeepseekV2MLAAttention",
    ),
)
