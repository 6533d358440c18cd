"""Qwen3-Next and Qwen3.5: layers of linear and of full attention, whose state stays with attention.

The FFN role owns the gate, the routed experts, the shared expert and its gate. ``mtp`` holds next-token-prediction
layers, which draft models load. Qwen3.5's decoder layer is a subclass of Qwen3-Next's, but its constructor skips the
parent's, so it has a table of its own. ``visual`` is a tower that the language-only model does not build.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_NEXT = "vllm.model_executor.models.qwen3_next"
_3_5 = "vllm.model_executor.models.qwen3_5"
# Qwen3-Next takes its MLP from Qwen2-MoE, under another name.
_MLP = "vllm.model_executor.models.qwen2_moe:Qwen2MoeMLP"
_ATTENTION = (
    f"{_NEXT}:Qwen3NextAttention",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
)
_ATTENTION_CHILDREN = (
    "self_attn",
    "linear_attn",
    "input_layernorm",
    "post_attention_layernorm",
    "attn_layer_scale",
    "ffn_layer_scale",
)

QWEN3_NEXT = Boundary(
    family="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    decoder=f"{_NEXT}:Qwen3NextDecoderLayer",
    ffn_attribute="mlp",
    dense=(_MLP,),
    moe=(f"{_NEXT}:Qwen3NextSparseMoeBlock",),
    router=Router(shared="shared_expert_intermediate_size", shared_ending=("down_proj", "expert_gate")),
    attention=_ATTENTION,
    weights=WeightRules(attention_children=_ATTENTION_CHILDREN, unbuilt_modules=("mtp",)),
)

QWEN3_5 = Boundary(
    family="qwen3_5",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    decoder=f"{_3_5}:Qwen3_5DecoderLayer",
    ffn_attribute="mlp",
    dense=(_MLP,),
    moe=(f"{_NEXT}:Qwen3NextSparseMoeBlock",),
    router=Router(shared="shared_expert_intermediate_size", shared_ending=("down_proj", "expert_gate")),
    attention=_ATTENTION,
    weights=WeightRules(
        attention_children=_ATTENTION_CHILDREN,
        unbuilt_modules=("mtp", "visual"),
        roots=("model.language_model.", "language_model.model.", "language_model.", "model.", ""),
    ),
    language_model_only=True,
)
