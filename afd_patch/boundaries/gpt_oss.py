"""gpt-oss: every layer is a mixture of experts with biases; attention sinks stay with attention.

The layer calls its attention ``attn``; checkpoints call it ``self_attn``, and only their names count for ownership.
"""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router

_MODULE = "vllm.model_executor.models.gpt_oss"

GPT_OSS = Boundary(
    family="gpt_oss",
    architectures=("GptOssForCausalLM",),
    decoder=f"{_MODULE}:TransformerBlock",
    ffn_attribute="mlp",
    moe=(f"{_MODULE}:MLPBlock",),
    router=Router(names=("router",)),
    attention=(f"{_MODULE}:OAIAttention",),
    refused_quantization=("quark",),
)
