"""DeepSeek V4, written by hand under its released tensor names, in bf16, fp8 and fp4.

Layer 0 routes by a hash of the token id and has a sliding window only, layer 1 compresses 4 tokens to one and has an
indexer, layer 2 compresses 128. vLLM's CPU top-k accepts 64, 128, 256 or 384 experts and top-k 6 or 8 only.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from .architecture import COMMON, HIDDEN, VOCAB, Architecture, Options
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

    from .random_weights import RandomTensors

EXPERTS, TOP_K = 64, 6
HEAD, HEADS, Q_RANK, OUT_GROUPS, OUT_RANK = 512, 4, 128, 2, 64
INDEX_HEADS, INDEX_HEAD = 64, 128
STREAMS = 4
"""Residual streams of the hyper-connections."""
RATIOS = (0, 4, 128)
_W = ("w1", "w3", "w2")


def build(seed: int, options: Options, *, experts: str, moe_intermediate: int) -> Checkpoint:
    """The model with experts in bf16, or with experts and attention in fp8 or (experts) fp4 blocks."""
    import torch

    from .random_weights import RandomTensors

    tensors = RandomTensors(seed)
    tensors.linear("embed.weight", VOCAB, HIDDEN)
    tensors.linear("head.weight", VOCAB, HIDDEN)
    tensors.vector("norm.weight", HIDDEN)
    tensors.linear("hc_head_fn", STREAMS, STREAMS * HIDDEN, dtype=torch.float32)
    tensors.vector("hc_head_base", STREAMS, 0, 0.5, torch.float32)
    tensors.vector("hc_head_scale", 1, 1, 0, torch.float32)
    for layer, ratio in enumerate(RATIOS):
        _hyper_connections(tensors, f"layers.{layer}")
        _attention(tensors, f"layers.{layer}.attn", ratio)
        _experts(tensors, f"layers.{layer}.ffn", layer == 0, moe_intermediate)
    config = _config(moe_intermediate)
    if experts != "bf16":
        _quantise(tensors, experts)
        config["expert_dtype"] = experts
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    return Checkpoint(config, tensors)


def _hyper_connections(tensors: RandomTensors, prefix: str) -> None:
    import torch

    mix = (2 + STREAMS) * STREAMS
    for part in ("attn", "ffn"):
        tensors.linear(f"{prefix}.hc_{part}_fn", mix, STREAMS * HIDDEN, dtype=torch.float32)
        tensors.vector(f"{prefix}.hc_{part}_base", mix, 0, 0.5, torch.float32)
        tensors.vector(f"{prefix}.hc_{part}_scale", 3, 1, 0.1, torch.float32)
        tensors.vector(f"{prefix}.{part}_norm.weight", HIDDEN)


def _attention(tensors: RandomTensors, prefix: str, ratio: int) -> None:
    import torch

    tensors.linear(f"{prefix}.wq_a.weight", Q_RANK, HIDDEN)
    tensors.linear(f"{prefix}.wkv.weight", HEAD, HIDDEN)
    tensors.vector(f"{prefix}.q_norm.weight", Q_RANK)
    tensors.vector(f"{prefix}.kv_norm.weight", HEAD)
    tensors.linear(f"{prefix}.wq_b.weight", HEADS * HEAD, Q_RANK)
    tensors.linear(f"{prefix}.wo_a.weight", OUT_GROUPS * OUT_RANK, HEADS * HEAD // OUT_GROUPS)
    tensors.linear(f"{prefix}.wo_b.weight", HIDDEN, OUT_GROUPS * OUT_RANK)
    tensors.vector(f"{prefix}.attn_sink", HEADS, 0, 1, torch.float32)
    if ratio > 1:
        _compressor(tensors, f"{prefix}.compressor", ratio, HEAD)
    if ratio == 4:
        tensors.linear(f"{prefix}.indexer.wq_b.weight", INDEX_HEADS * INDEX_HEAD, Q_RANK)
        tensors.linear(f"{prefix}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        _compressor(tensors, f"{prefix}.indexer.compressor", ratio, INDEX_HEAD)


def _compressor(tensors: RandomTensors, prefix: str, ratio: int, width: int) -> None:
    import torch

    rows = width * (2 if ratio == 4 else 1)
    tensors.linear(f"{prefix}.wkv.weight", rows, HIDDEN)
    tensors.linear(f"{prefix}.wgate.weight", rows, HIDDEN)
    tensors.linear(f"{prefix}.ape", ratio, rows, dtype=torch.float32)
    tensors.vector(f"{prefix}.norm.weight", width)


def _experts(tensors: RandomTensors, prefix: str, hashed: bool, intermediate: int) -> None:
    import torch

    tensors.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN)
    if hashed:
        choices = [torch.randperm(EXPERTS, generator=tensors.generator)[:TOP_K] for _ in range(VOCAB)]
        tensors[f"{prefix}.gate.tid2eid"] = torch.stack(choices).to(torch.int32)
    else:
        tensors.vector(f"{prefix}.gate.bias", EXPERTS, 0.2, 0.2, torch.float32)
    for expert in range(EXPERTS):
        tensors.mlp(f"{prefix}.experts.{expert}", HIDDEN, intermediate, _W)
    tensors.mlp(f"{prefix}.shared_experts", HIDDEN, intermediate, _W)


def _config(moe_intermediate: int) -> dict[str, Any]:
    return {
        **COMMON,
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(RATIOS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "qk_rope_head_dim": 64,
        "q_lora_rank": Q_RANK,
        "o_groups": OUT_GROUPS,
        "o_lora_rank": OUT_RANK,
        "compress_ratios": list(RATIOS),
        "compress_rope_theta": 160000.0,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_HEAD,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": moe_intermediate,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


_ATTENTION_OR_SHARED = re.compile(
    r"attn\.(wq_a|wkv|wq_b|wo_a|wo_b|indexer\.wq_b)\.weight$|\.shared_experts\..*\.weight$"
)


def _quantise(tensors: dict[str, torch.Tensor], experts: str) -> None:
    """Replace weights by their quantised values and add the scales, as the released checkpoints have them."""
    import torch

    for name in list(tensors):
        if ".experts." in name:
            values, scale = fp4_blocks(tensors[name]) if experts == "fp4" else fp8_blocks(tensors[name])
        elif _ATTENTION_OR_SHARED.search(name):
            values, scale = fp8_blocks(tensors[name], power_of_two=experts == "fp4")
        else:
            continue
        tensors[name] = values.view(torch.int8) if values.dtype == torch.uint8 else values
        tensors[name.removesuffix(".weight") + ".scale"] = scale


def fp8_blocks(
    weight: torch.Tensor, block: int = 128, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one scale for each block x block tile; scales are float32, or e8m0 powers of two."""
    import torch

    rows, columns = weight.shape
    row_tiles, column_tiles = -(-rows // block), -(-columns // block)
    padded = torch.zeros(row_tiles * block, column_tiles * block)
    padded[:rows, :columns] = weight.float()
    tiles = padded.view(row_tiles, block, column_tiles, block)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448.0
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (tiles / scale[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu) if power_of_two else scale


def fp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4: two e2m1 values in a byte (the first in the low half), one e8m0 scale for 32 values."""
    import torch

    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 32, 32)
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-9))) - 2)
    scaled = groups / scale
    magnitude = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    code = (magnitude | ((scaled < 0).long() << 3)).view(rows, columns)
    packed = (code[:, ::2] | (code[:, 1::2] << 4)).to(torch.uint8)
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)


def _row(name: str, about: str, experts: str, moe_intermediate: int) -> Architecture:
    return Architecture(name, about, partial(build, experts=experts, moe_intermediate=moe_intermediate))


ARCHITECTURES = (
    _row(
        "deepseek_v4",
        "DeepSeek V4 in bf16: 64 experts, hash routing in layer 0; not on stock vLLM for CPU",
        "bf16",
        32,
    ),
    _row("deepseek_v4_fp8", "DeepSeek V4 in fp8 blocks; not on stock vLLM for CPU", "fp8", 128),
    _row(
        "deepseek_v4_fp4",
        "DeepSeek V4 as released: fp4 experts, fp8 attention; not on stock vLLM for CPU",
        "fp4",
        128,
    ),
)
