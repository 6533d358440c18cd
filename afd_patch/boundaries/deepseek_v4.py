"""DeepSeek V4: every layer is a mixture of experts, called with its rows and their token ids.

The first layers look their experts up in a table by token id (``num_hash_layers``), so the ids cross beside the rows in
every layer. Residual streams, the weights that mix them (``hc_*``) and everything sparse attention keeps stay in the
attention role. The table describes the classes that vLLM has for CPUs; CUDA, ROCm and XPU have others of the same
names (``vllm.models.deepseek_v4`` chooses by platform), and models that are built there are refused.

Names are those of the released checkpoints.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, WeightRules

_CPU = "vllm.models.deepseek_v4.cpu"

DEEPSEEK_V4 = Boundary(
    family="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    decoder=f"{_CPU}.model:DeepseekV4DecoderLayer",
    ffn_attribute="ffn",
    moe=(f"{_CPU}.model:DeepseekV4MoE",),
    attention=(f"{_CPU}.cpu_sparse:DeepseekV4CPUAttention",),
    crosses="rows [tokens, hidden] in the model's dtype, both ways; beside them, there, input_ids [tokens] in int32",
    weights=WeightRules(
        ffn_children=("ffn",),
        attention_children=(
            "attn",
            "attn_norm",
            "ffn_norm",
            *(f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")),
        ),
        attention_modules=("embed", "norm", "head", "hc_head_fn", "hc_head_base", "hc_head_scale"),
        unbuilt_modules=("mtp",),
        roots=("",),
    ),
    input_ids=True,
    devices=("cpu",),
    refused_moe_backends=("deep_gemm_mega_moe", "aiter_mega_moe"),
)
