"""Quantised checkpoints: as exact as plain ones, or refused with stock vLLM's own reason where it has no kernel.

Which formats stock vLLM runs depends on the processor: most of its CPU kernels for experts want AMX tiles. So each case
asks stock vLLM first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engine.children import Child
from tests.engine.test_more_architectures import observe
from tests.engine.test_ownership import assert_shared, ffn_model

Serving = Callable[..., AbstractContextManager[Child]]

LAYERS = 4
FORMATS = ("w8a8", "int4", "fp8", "fp8_rows", "awq", "gptq")
#: What stock vLLM runs on every x86-64 processor.
EVERYWHERE = {"llama_w8a8", "llama_int4"}


@pytest.mark.parametrize("plain", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantisation", FORMATS)
def test_exact_or_refused_as_by_stock_vllm(
    plain: str,
    quantisation: str,
    checkpoint: Callable[..., str],
    serving: Serving,
    attention: dict[str, str],
    tmp_path: Path,
) -> None:
    path = checkpoint(f"{plain}_{quantisation}")
    native = Child(observe, path)
    kind, stock = native.outcome()
    if kind == "error":
        assert f"{plain}_{quantisation}" not in EVERYWHERE, stock
        refused(stock, Child(ffn_model, path, f"unix:{tmp_path}/other.sock"))
        return
    assert kind == "value", stock
    with serving(path):
        att = Child(observe, path, env=attention).result()
    ffn = Child(ffn_model, path, f"unix:{tmp_path}/other.sock").result()
    assert att["outputs"] == stock["outputs"]
    assert att["calls"] > 0 and att["calls"] % LAYERS == 0
    # Scales and zero points included.
    assert_shared(att["parameters"], ffn["parameters"], stock["parameters"])
    assert not set(att["read"]) & set(ffn["read"]), "no tensor is read by both"
    assert sorted(att["read"] + ffn["read"]) == sorted(stock["read"])


def with_kv_scales(path: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{path}/model.safetensors")
    scales = ((layer, name) for layer in range(LAYERS) for name in ("k_scale", "v_scale"))
    tensors |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor([0.02 + 0.01 * layer]) for layer, name in scales}
    save_file(tensors, f"{path}/model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(path, "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    Path(path, "config.json").write_text(json.dumps(config))


def test_scales_of_the_kv_cache(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str], tmp_path: Path
) -> None:
    """They are the attention role's; the FFN role reads none of them."""
    plain, path = checkpoint("llama_w8a8"), str(tmp_path / "scaled")
    shutil.copytree(plain, path)
    Child(with_kv_scales, path).result()
    with serving(path):
        att = Child(observe, path, env=attention, kv_cache_dtype="fp8").result()
    stock = Child(observe, path, kv_cache_dtype="fp8").result()
    ffn = Child(ffn_model, path, f"unix:{tmp_path}/other.sock").result()
    assert att["outputs"] == stock["outputs"]
    assert stock["outputs"] != Child(observe, plain, kv_cache_dtype="fp8").result()["outputs"], "they count"
    assert sum(name.endswith(("k_scale", "v_scale")) for name in att["read"]) == 2 * LAYERS
    assert not any(name.endswith(("k_scale", "v_scale")) for name in ffn["read"])
    assert sorted(att["read"] + ffn["read"]) == sorted(stock["read"])


def refused(reason: str, ffn: Child) -> None:
    """``ffn`` stopped with the ``reason`` that stock vLLM gave, before weights were read."""
    kind, message = ffn.outcome()
    assert kind == "error", message
    assert message.startswith("UnsupportedError: vLLM itself cannot run "), message
    assert " ".join(reason.partition(": ")[2].split()).rstrip(".") in message
    assert "Loading weights took" not in ffn.text()


def without(tensor: str, path: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[tensor]
    save_file(tensors, path)


def test_a_scale_that_is_missing_is_noticed(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """A scale counts as a parameter that a checkpoint must fill."""
    model = shutil.copytree(checkpoint("llama_w8a8"), tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    Child(without, name, str(model / "model.safetensors")).result()
    kind, message = Child(ffn_model, str(model), f"unix:{tmp_path}/other.sock").outcome()
    assert kind == "error"
    assert message.startswith(f"WeightError: the checkpoint does not fill {name} (0% written)")
