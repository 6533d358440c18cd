"""What each role builds, holds and reads: nothing of the other one's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import ENGINE, build, generate

Serving = Callable[..., AbstractContextManager[Child]]
ARCHITECTURES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "llama", "qwen3")
FFN_NAMES = (".mlp.", ".block_sparse_moe.")


def describe(model: Any, vllm_config: Any, read: list[str]) -> dict[str, Any]:
    compilation = vllm_config.compilation_config
    return {
        "parameters": {name: (tuple(p.shape), p.device.type) for name, p in model.named_parameters()},
        "registered": sorted(compilation.static_forward_context),
        "moe layers": list(compilation.static_all_moe_layers),
        "read": read,
    }


def record_reads() -> list[str]:
    """Names of the tensors that are read from safetensors files from now on."""
    import safetensors
    from vllm.model_executor.model_loader import weight_utils

    read: list[str] = []
    native = safetensors.safe_open

    class Recording:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = native(*args, **kwargs)

        def __enter__(self) -> Any:
            self._open = self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> Any:
            return self._file.__exit__(*args)

        def keys(self) -> Any:
            return self._open.keys()

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self._open.get_tensor(name)

    weight_utils.safe_open = Recording
    return read


def attention_model(path: str, **engine: Any) -> dict[str, Any]:
    read = record_reads()
    llm = build(path, **engine)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    result = describe(model, llm.llm_engine.vllm_config, read)
    layer = model.model.layers[1]
    ffn = next(getattr(layer, name) for name in ("mlp", "block_sparse_moe") if hasattr(layer, name))
    result["stand-in"] = [base.__name__ for base in type(ffn).__mro__[:4]]
    result["stand-in parameters"] = len(list(ffn.parameters())) + len(list(ffn.buffers()))
    result["lists"] = [len(getattr(model, name, [])) for name in ("moe_layers", "moe_mlp_layers")]
    return result


def ffn_model(path: str, endpoint: str, **engine: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    import afd_patch
    from afd_patch.ffn.runner import FFNRunner, configure

    read = record_reads()
    afd_patch.activate(role="ffn", listen=endpoint)
    vllm_config = configure(EngineArgs(model=path, **{**ENGINE, **engine}))
    runner = FFNRunner(vllm_config)
    return describe(runner._executor.driver_worker.worker.model_runner.model, vllm_config, read)


def stock_model(path: str, **engine: Any) -> dict[str, Any]:
    read = record_reads()
    llm = build(path, **engine)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    return describe(worker.model_runner.model, llm.llm_engine.vllm_config, read)


def assert_shared(attention: dict[str, Any], ffn: dict[str, Any], stock: dict[str, Any]) -> None:
    """Together the roles hold by name what stock vLLM holds, and nothing twice; of the head see test_vocabulary.py."""
    assert not attention.keys() & ffn.keys()
    both = attention | ffn
    assert both.keys() == stock.keys()
    different = {name for name in stock if both[name] != stock[name]}
    assert different <= {"lm_head.weight", "language_model.lm_head.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_roles_share_a_model_without_overlap(
    architecture: str, checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoint(architecture, shards=2)
    with serving(path):
        att = Child(attention_model, path, env=attention).result()
    ffn = Child(ffn_model, path, f"unix:{tmp_path}/other.sock").result()
    stock = Child(stock_model, path).result()
    for role in (att, ffn):
        assert all(device == "cpu" for _, device in role["parameters"].values())
    assert_shared(att["parameters"], ffn["parameters"], stock["parameters"])
    assert all(any(part in name for part in FFN_NAMES) for name in ffn["parameters"])
    assert not set(att["read"]) & set(ffn["read"]), "no tensor is read by both"
    assert sorted(att["read"] + ffn["read"]) == sorted(stock["read"])
    assert not att["moe layers"]
    assert ffn["moe layers"] == stock["moe layers"]
    assert all(name.endswith("attn") for name in att["registered"])
    assert not any(name.endswith("attn") for name in ffn["registered"])
    assert sorted(att["registered"] + ffn["registered"]) == stock["registered"]
    assert att["stand-in"][0].startswith("Remote")
    assert att["stand-in"][1] == "RemoteFFN"
    assert "Remote" + att["stand-in"][2] == att["stand-in"][0]
    assert att["stand-in parameters"] == 0


def largest_allocation(path: str) -> int:
    """The largest tensor, in bytes, that building the attention role allocates outside of the meta device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from afd_patch.patches.model_build import ModelBuild

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_meta and "empty" in str(func):
                largest[0] = max(largest[0], out.numel() * out.element_size())
            return out

    native = ModelBuild.ffn_module

    def watched(self: Any, module: Any) -> Any:
        import contextlib

        @contextlib.contextmanager
        def both() -> Any:
            with Watch(), native(self, module):
                yield

        return both()

    ModelBuild.ffn_module = watched  # type: ignore[method-assign]
    build(path)
    return largest[0]


def test_no_ffn_weight_is_ever_allocated_on_the_attention_side(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    path = checkpoint("qwen3_moe")
    with serving(path):
        assert Child(largest_allocation, path, env=attention).result() < 4096


def test_dummy_weights_are_the_same_on_both_sides(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    path = checkpoint("qwen3_moe")
    with serving(path, load_format="dummy"):
        split = Child(generate, path, env=attention, load_format="dummy").result()
    stock = Child(generate, path, load_format="dummy").result()
    assert split["calls"] > 0
    assert split["outputs"] == stock["outputs"]


# -- broken checkpoints ---------------------------------------------------------------------------------------------


def rewrite(path: str, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """A copy of a single-file checkpoint with other tensors."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    tensors = change(load_file(target / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return str(target)


def without(name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    assert name in tensors
    return {key: tensor for key, tensor in tensors.items() if key != name}


def renamed(old: str, new: str, tensors: dict[str, Any]) -> dict[str, Any]:
    assert old in tensors
    return {new if key == old else key: tensor for key, tensor in tensors.items()}


def broken_copy(path: str, target: str, kind: str, old: str, new: str) -> str:
    changes = {"without": lambda t: without(old, t), "renamed": lambda t: renamed(old, new, t)}
    return rewrite(path, Path(target), changes[kind])


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("kind", "old", "new", "expected"),
    [
        ("without", EXPERT, "", [EXPERT, "w13_weight", "incomplete"]),
        (
            "without",
            "model.layers.1.mlp.gate_proj.weight",
            "",
            ["model.layers.1.mlp.gate_up_proj.weight (50% written)"],
        ),
        ("renamed", EXPERT, "model.layers.2.ml.experts.5.up_proj.weight", ["'ml'", "no rule", "layers.2.ml.experts.5"]),
        ("renamed", EXPERT, "model.layer.2.mlp.experts.5.up_proj.weight", ["no rule knows it", "model.layer.2.mlp"]),
    ],
)
def test_a_broken_ffn_checkpoint_is_refused(
    kind: str, old: str, new: str, expected: list[str], checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    path = Child(broken_copy, checkpoint("qwen3_moe"), str(tmp_path / "broken"), kind, old, new).result()
    outcome, message = Child(ffn_model, path, f"unix:{tmp_path}/f.sock").outcome()
    assert outcome == "error"
    assert "WeightError" in message
    for part in expected:
        assert part in message


def test_a_missing_attention_tensor_is_refused(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str], tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    path = Child(broken_copy, checkpoint("qwen3_moe"), str(tmp_path / "broken"), "without", name, "").result()
    with serving(path):
        outcome, message = Child(attention_model, path, env=attention).outcome()
    assert outcome == "error"
    assert "WeightError" in message
    assert "qkv_proj" in message


def test_missing_expert_tensor_goes_unnoticed_on_stock_vllm(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """Why there is a check of our own; when vLLM has one, ours can go."""
    path = Child(broken_copy, checkpoint("qwen3_moe"), str(tmp_path / "broken"), "without", EXPERT, "").result()
    assert Child(stock_model, path).outcome()[0] == "value"


def test_the_proof_is_one_line(checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]) -> None:
    path = checkpoint("deepseek_v3")
    with serving(path) as server:
        child = Child(attention_model, path, env=attention)
        child.result()
    for text, role, crossing in ((child.text(), "attention", "proxies 4"), (server.text(), "ffn", "FFN modules 4")):
        lines = [line for line in text.splitlines() if f"AFD {role}: vLLM " in line]
        assert len(lines) == 1
        assert f"{crossing} == layers that cross 4" in lines[0]
        assert "foreign parameters 0" in lines[0]
