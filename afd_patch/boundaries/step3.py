"""Step-3, text: a sparse layer keeps its experts and its shared expert side by side and adds their results itself.

Both cross in one hand-off. The FFN role adds them, in the layer's order; in a compiled model the native layer does.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_MODULE = "vllm.model_executor.models.step3_text"

STEP3_TEXT = Boundary(
    family="step3_text",
    architectures=("Step3TextForCausalLM",),
    decoder=f"{_MODULE}:Step3TextDecoderLayer",
    ffn_attribute="mlp",
    ffn_summands=("share_expert", "moe"),
    dense=(f"{_MODULE}:Step3TextMLP",),
    moe=(f"{_MODULE}:FusedMoEBlock",),
    router=Router(top_k="moe_top_k"),
    attention=(f"{_MODULE}:Step3TextAttention",),
    weights=WeightRules(ffn_children=("mlp", "moe", "share_expert")),
)
