"""Quantised tiny checkpoints: what is stored is, decoded, the plain weights to within the rounding of the format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afd_patch.tiny import make
from afd_patch.tiny.quantised import GROUP

NAME = "model.layers.1.mlp.down_proj."


def load(architecture: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(make(architecture, folder / architecture) / "model.safetensors")


def unpacked(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of a word next to each other, in their own order."""
    values = torch.stack([(words >> 4 * place) & 15 for place in range(8)], -1)
    return values[..., [order.index(place) for place in range(8)]].flatten(-2)


def decoded(kind: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    if kind in ("w8a8", "fp8_rows"):
        return t["weight"].float() * t["weight_scale"].float()
    if kind == "fp8":
        scale = t["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return t["weight"].float() * scale
    if kind == "int4":
        return (unpacked(t["weight_packed"]) - 8) * t["weight_scale"].float().repeat_interleave(GROUP, 1)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if kind == "awq" else tuple(range(8))
    values = unpacked(t["qweight"], order) if kind == "awq" else unpacked(t["qweight"].t()).t()
    zeros = unpacked(t["qzeros"], order) + (kind == "gptq")
    scales = t["scales"].float().repeat_interleave(GROUP, 0)
    return ((values - zeros.repeat_interleave(GROUP, 0)) * scales).t()


@pytest.mark.parametrize("kind", ["w8a8", "int4", "fp8", "fp8_rows", "awq", "gptq"])
def test_decoded_is_the_plain_weight(kind: str, tmp_path: Path) -> None:
    plain = load("llama", tmp_path)[f"{NAME}weight"].float()
    stored = load(f"llama_{kind}", tmp_path)
    tensors = {name.removeprefix(NAME): tensor for name, tensor in stored.items() if name.startswith(NAME)}
    error = (decoded(kind, tensors) - plain).abs()
    step = plain.abs().max() / {"w8a8": 127, "fp8": 14, "fp8_rows": 14}.get(kind, 7)
    assert error.max() <= step * 0.75, "half a step, and the rounding of the scale"
    assert f"{NAME}weight" not in stored or stored[f"{NAME}weight"].element_size() == 1


def test_router_and_head_stay_as_they_are(tmp_path: Path) -> None:
    plain, stored = load("qwen3_moe", tmp_path), load("qwen3_moe_awq", tmp_path)
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert torch.equal(plain[name], stored[name])
    config = json.loads((tmp_path / "qwen3_moe_awq" / "config.json").read_text())["quantization_config"]
    kept = config["modules_to_not_convert"]
    assert kept == ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in (0, 2, 3))], "layer 1 is dense"
