"""Llama 4, text: dense and sparse layers take turns, under ``feed_forward``; dense ones are Llama's own MLP."""

from __future__ import annotations

from afd_patch.boundaries.table import Boundary, Router, WeightRules

_MODULE = "vllm.model_executor.models.llama4"

LLAMA4 = Boundary(
    family="llama4",
    architectures=("Llama4ForCausalLM",),
    decoder=f"{_MODULE}:Llama4DecoderLayer",
    ffn_attribute="feed_forward",
    dense=("vllm.model_executor.models.llama:LlamaMLP",),
    moe=(f"{_MODULE}:Llama4MoE",),
    router=Router(names=("router",), always_shared=True),
    attention=(f"{_MODULE}:Llama4Attention",),
    weights=WeightRules(ffn_children=("feed_forward",)),
)
