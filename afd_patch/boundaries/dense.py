"""Dense models: the same mechanism, one MLP a layer."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary

_LLAMA = "vllm.model_executor.models.llama"
_QWEN3 = "vllm.model_executor.models.qwen3"

LLAMA = Boundary(
    family="llama",
    architectures=("LlamaForCausalLM",),
    decoder=f"{_LLAMA}:LlamaDecoderLayer",
    ffn_attribute="mlp",
    dense=(f"{_LLAMA}:LlamaMLP",),
    attention=(f"{_LLAMA}:LlamaAttention",),
)

QWEN3 = Boundary(
    family="qwen3",
    architectures=("Qwen3ForCausalLM",),
    decoder=f"{_QWEN3}:Qwen3DecoderLayer",
    ffn_attribute="mlp",
    # Qwen3 takes its MLP from Qwen2, under another name.
    dense=("vllm.model_executor.models.qwen2:Qwen2MLP",),
    attention=(f"{_QWEN3}:Qwen3Attention",),
)
