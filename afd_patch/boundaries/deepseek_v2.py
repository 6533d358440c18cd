"""DeepSeek V1, V2 and V3 (and Kimi-K2, whose architecture is V3's): one native implementation, one table.

The decoder layer tests ``isinstance(self.mlp, DeepseekV2MLP)`` in every forward to scale fp16 outputs, and
``isinstance(self.self_attn, DeepseekAttention)``; stand-ins keep both true where they were true.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary

_MODULE = "vllm.model_executor.models.deepseek_v2"

DEEPSEEK_V2 = Boundary(
    family="deepseek_v2",
    architectures=("DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    decoder=f"{_MODULE}:DeepseekV2DecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_MODULE}:DeepseekV2MLP",),
    moe=(f"{_MODULE}:DeepseekV2MoE",),
    attention=(
        f"{_MODULE}:DeepseekAttention",
        f"{_MODULE}:DeepseekV2Attention",
        f"{_MODULE}:DeepseekV2MLAAttention",
    ),
    ends_in_sum=True,
)
