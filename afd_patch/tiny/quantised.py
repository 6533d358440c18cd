"""Quantised checkpoints: a small model whose linear weights are stored as the common quantisation tools store them.

Each is made of the plain checkpoint of the same name. The router and the head stay as they are, as in released
checkpoints. Rounding is to the nearest value, without calibration: nobody asks these models for quality.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from . import dense_and_gqa
from .architecture import Architecture, Options
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

    Quantise = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]

GROUP = 128
"""Input columns that share a scale, in the 4-bit formats."""

_LINEAR = re.compile(r"\.(?:q|k|v|o|gate|up|down)_proj\.weight$")
#: The order in which AWQ packs eight values into a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLAIN_ORDER = tuple(range(8))


def build(seed: int, options: Options, *, plain: str, quantisation: str) -> Checkpoint:
    """The checkpoint ``plain`` with every linear weight replaced by its quantised tensors."""
    (source,) = [architecture for architecture in dense_and_gqa.ARCHITECTURES if architecture.name == plain]
    checkpoint = source.build(seed, options)
    quantise, config = _METHODS[quantisation]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        tensors.update(quantise(name, tensor) if _LINEAR.search(name) else {name: tensor})
    routers = sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".mlp.gate.weight"))
    as_they_are = {"modules_to_not_convert": ["lm_head", *routers]} if quantisation in ("fp8", "awq") else {}
    return Checkpoint({**checkpoint.config, "quantization_config": {**config, **as_they_are}}, tensors)


# -- the formats ---------------------------------------------------------------------------------------------------


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors ``int-quantized``: one scale a row."""
    import torch

    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {
        name: (weight.float() / scale).round().to(torch.int8),
        f"{name}_scale": scale.to(torch.bfloat16),
    }


def _fp8_rows(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors ``float-quantized``: one scale a row."""
    import torch

    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def _fp8_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """DeepSeek's fp8: one scale for 128 x 128 weights."""
    from .deepseek_v4 import fp8_blocks

    values, scale = fp8_blocks(weight)
    return {name: values, f"{name}_scale_inv": scale}


def _int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors ``pack-quantized``: eight values in a word along the inputs."""
    import torch

    values, scale = _four_bits(weight)
    module = name.removesuffix("weight")
    return {
        f"{module}weight_packed": _packed(values, _PLAIN_ORDER),
        f"{module}weight_scale": scale.to(torch.bfloat16),
        f"{module}weight_shape": torch.tensor(weight.shape),
    }


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AWQ ``gemm``: inputs first, eight outputs in a word, in an order of its own, and the zero points with them."""
    import torch

    values, scale = _four_bits(weight)
    module = name.removesuffix("weight")
    return {
        f"{module}qweight": _packed(values.t(), _AWQ_ORDER),
        f"{module}qzeros": _packed(torch.full_like(scale.t(), 8), _AWQ_ORDER),
        f"{module}scales": scale.t().half().contiguous(),
    }


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """GPTQ: inputs first, eight inputs in a word; a stored zero point is one too small."""
    import torch

    values, scale = _four_bits(weight)
    module = name.removesuffix("weight")
    return {
        f"{module}qweight": _packed(values, _PLAIN_ORDER).t().contiguous(),
        f"{module}qzeros": _packed(torch.full_like(scale.t(), 7), _PLAIN_ORDER),
        f"{module}scales": scale.t().half().contiguous(),
    }


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values from 0 to 15 with 8 for zero, and a scale for each row and group of columns."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(-1) / 7
    return ((groups / scale[..., None]).round().clamp(-8, 7) + 8).view(rows, columns), scale


def _packed(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Eight 4-bit values in one int32, along the last dimension."""
    import torch

    words = values.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    packed = sum(words[..., place] << (4 * place) for place in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


# -- what config.json says about them ------------------------------------------------------------------------------


def _compressed_tensors(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def _w8a8(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    each = {"num_bits": 8, "type": kind, "symmetric": True}
    return {**each, "strategy": "channel"}, {**each, "strategy": "token", "dynamic": True}


_FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}

_METHODS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "w8a8": (_int8, _compressed_tensors("int-quantized", *_w8a8("int"))),
    "int4": (_int4, _compressed_tensors("pack-quantized", _FOUR_BITS, None)),
    "fp8": (
        _fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "fp8_rows": (_fp8_rows, _compressed_tensors("float-quantized", *_w8a8("float"))),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "dynamic": {r"-:.*mlp\.gate$": {}},
        },
    ),
}

_ABOUT = {
    "w8a8": "int8 weights and activations (compressed-tensors)",
    "int4": "4-bit weights (compressed-tensors)",
    "fp8": "fp8 in blocks of 128 x 128",
    "fp8_rows": "fp8 with a scale a row (compressed-tensors); not on stock vLLM for CPU",
    "awq": "4-bit weights (AWQ)",
    "gptq": "4-bit weights (GPTQ); not on stock vLLM for CPU",
}


def _rows() -> Iterator[Architecture]:
    for plain, title in (("qwen3_moe", "Qwen3-MoE"), ("llama", "dense Llama")):
        for quantisation, about in _ABOUT.items():
            make = partial(build, plain=plain, quantisation=quantisation)
            yield Architecture(f"{plain}_{quantisation}", f"{title}, {about}", make)


ARCHITECTURES = tuple(_rows())
