"""Whatever is wrong stops the process before weights are read, with one sentence: the cause, and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.engines import PROMPTS, ask, build, generate
from tests.engine.test_tensor_parallel import UNBOUND

Serving = Callable[..., AbstractContextManager[Child]]
NOWHERE = {"AFD_ROLE": "attention", "AFD_FFN": "unix:/nowhere/ffn.sock", "AFD_CONNECT_TIMEOUT": "1"}


def refused(child: Child) -> str:
    """The sentence with which ``child`` stopped, before it read a weight."""
    kind, message = child.outcome()
    assert kind == "exit", f"{kind}: {message}\n{child.text()[-3000:]}"
    assert message.startswith("afd_patch: ")
    assert "Loading weights took" not in child.text()
    assert "Traceback" not in child.text()
    return message


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"AFD_ROLE": "attenton"}, "did you mean 'attention'?"),
        ({"AFD_ROLE": "attention", "AFD_FFN": ""}, "set AFD_FFN="),
        ({"AFD_FFN": "udp://host:1"}, "write unix:PATH or tcp://HOST:PORT"),
        ({"AFD_FFN": "tcp://host:99999"}, "a port between 1 and 65535"),
        ({"AFD_FFN": "unix:/a.sock,unix:/a.sock"}, "names an endpoint twice"),
        ({"AFD_FFN": "unix:/" + "x" * 200}, "choose a shorter folder"),
        ({"AFD_GATE": "atention"}, "AFD_GATE='atention' is not a place for the router"),
        ({"AFD_CALL_TIMEOUT": "soon"}, "AFD_CALL_TIMEOUT='soon' is not a number"),
        ({"AFD_CALL_TIMEOUT": "-1"}, "must be a positive number of seconds"),
        ({"AFD_CALL_TIMEUOT": "3"}, "did you mean 'AFD_CALL_TIMEOUT'?"),
        ({"VLLM_PLUGINS": "lora_filesystem_resolver"}, "add it (VLLM_PLUGINS=lora_filesystem_resolver,afd_patch)"),
        ({}, "no FFN server answered at unix:/nowhere/ffn.sock within 1 s"),
        ({"AFD_FFN": "tcp://127.0.0.1:1"}, "no FFN server answered at tcp://127.0.0.1:1 within 1 s"),
        (
            {"AFD_GATE": "attention"},
            "it has no router, so with AFD_GATE=attention nothing would cross; use AFD_GATE=ffn",
        ),
    ],
)
def test_settings(env: dict[str, str], expected: str, checkpoint: Callable[..., str]) -> None:
    message = refused(Child(build, checkpoint("llama"), env={**NOWHERE, **env}))
    assert expected in message


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "--enable-expert-parallel is not supported yet"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not supported yet"),
        ({"load_format": "pt"}, "--load-format pt was not tried"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel is not supported yet"),
        ({"runner": "pooling", "convert": "classify"}, "--convert classify adds a head"),
        ({"weight_transfer_config": {"backend": "ipc"}}, "--weight-transfer-config lets a trainer change the weights"),
    ],
)
def test_features(engine: dict[str, Any], expected: str, checkpoint: Callable[..., str]) -> None:
    env = {**NOWHERE, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert expected in refused(Child(build, checkpoint("qwen3_moe"), env=env, **engine))


def reload_weights(model: str) -> dict[str, Any]:
    from afd_patch.errors import UnsupportedError

    llm = build(model)
    before = ask(llm, PROMPTS)
    with pytest.raises(UnsupportedError) as raised:
        llm.collective_rpc("reload_weights")
    return {"said": str(raised.value), "goes on": ask(llm, PROMPTS) == before}


def test_other_weights_while_it_runs(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    """One role with other weights would be another model; requests go on with the old ones."""
    model = checkpoint("qwen3_moe")
    with serving(model):
        seen = Child(reload_weights, model, env=attention).result()
    assert seen["said"].startswith("reload_weights would change the weights of one role")
    assert seen["goes on"]


def save_sharded_state(model: str, folder: str) -> None:
    Path(folder).mkdir()
    build(model).llm_engine.engine_core.save_sharded_state(path=folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model) / name, folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_why_sharded_state_is_refused(architecture: str, checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """Stock vLLM for CPU cannot load what it has saved itself, so there is nothing to be equal to."""
    folder = str(tmp_path / "sharded")
    Child(save_sharded_state, checkpoint(architecture), folder).result()
    kind, message = Child(build, folder, load_format="sharded_state").outcome()
    assert kind == "error"
    assert "Missing keys ('model.layers.0.self_attn.qkv_proj.weight'" in message


def test_why_pipeline_parallelism_is_refused(checkpoint: Callable[..., str]) -> None:
    """Stock vLLM for CPU fails in the first forward of the second stage."""
    child = Child(generate, checkpoint("qwen3_moe"), env=UNBOUND, pipeline_parallel_size=2)
    try:
        kind, _ = child.outcome()
    finally:
        child.kill()
    assert kind == "error"
    assert "assert self.intermediate_tensors is not None" in child.text()


def test_an_architecture_without_a_table(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """vLLM runs Mistral with its Llama code; we take no architecture for another one."""
    model = shutil.copytree(checkpoint("llama"), tmp_path / "mistral")
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MistralForCausalLM"]}))
    message = refused(Child(build, str(model), env=NOWHERE))
    assert "MistralForCausalLM has no boundary table" in message
    assert "docs/adding-a-model.md" in message


@pytest.mark.parametrize(
    ("served", "asked", "engine", "expected"),
    [
        ("deepseek_v2", "deepseek_v3", {}, "architecture: 'DeepseekV3ForCausalLM' there"),
        ("qwen3_moe", "qwen3_moe", {"dtype": "float32"}, "dtype: 'bfloat16' here, 'float32' there"),
    ],
)
def test_another_model(
    served: str,
    asked: str,
    engine: dict[str, Any],
    expected: str,
    checkpoint: Callable[..., str],
    serving: Serving,
    attention: dict[str, str],
) -> None:
    """The server refuses, and both sides say why with both values."""
    with serving(checkpoint(served)) as server:
        server.wait_for("AFD ffn: ready:")
        message = refused(Child(build, checkpoint(asked), env=attention, **engine))
        assert "the two roles do not belong together" in message
        fields = expected.partition(":")[0]
        assert f"{fields}: " in message
        server.wait_for("dropped: the two roles do not belong together")


def test_same_model_elsewhere_is_the_same_model(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str], tmp_path: Any
) -> None:
    """Identity is content: a copy, sharded differently, behind a symlink."""
    original, sharded = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", shards=2)
    link = tmp_path / "link"
    link.symlink_to(sharded)
    with serving(original):
        assert Child(generate, str(link), env=attention).result()["calls"] > 0


def missing_patch_point(model: str) -> Any:
    """A vLLM whose function has lost a parameter."""
    import vllm.forward_context as module

    def create_forward_context(attn_metadata: Any, vllm_config: Any) -> None:
        raise AssertionError

    module.create_forward_context = create_forward_context
    return build(model)


def vanished_patch_point(model: str) -> Any:
    """A vLLM whose decoder layer has another name; its module is imported late."""
    import importlib

    module = importlib.import_module("vllm.model_executor.models.qwen3_moe")
    del module.Qwen3MoeDecoderLayer
    return build(model)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(missing_patch_point, "create_forward_context"), (vanished_patch_point, "Qwen3MoeDecoderLayer")],
)
def test_a_patch_point_that_changed(function: Any, expected: str, checkpoint: Callable[..., str]) -> None:
    message = refused(Child(function, checkpoint("qwen3_moe"), env=NOWHERE))
    assert expected in message


def overwritten(model: str) -> Any:
    """Somebody replaces one of our slots after activation."""
    from vllm import forward_context

    from afd_patch import plugin

    native = forward_context.create_forward_context
    plugin.register()
    forward_context.create_forward_context = native
    return build(model)


def test_half_patched_is_noticed_at_the_barrier(
    checkpoint: Callable[..., str], serving: Serving, attention: dict[str, str]
) -> None:
    model = checkpoint("qwen3_moe")
    with serving(model):
        child = Child(overwritten, model, env=attention)
        kind, message = child.outcome()
    assert kind in ("error", "exit")
    assert "forward_context.create" in message
    assert "Loading weights took" not in child.text()


def test_python_activation_raises_instead_of_exiting(checkpoint: Callable[..., str]) -> None:
    kind, message = Child(from_python, checkpoint("qwen3_moe")).outcome()
    assert kind == "error"
    assert message.startswith("ConnectorError: no FFN server answered")


def from_python(model: str) -> None:
    import afd_patch

    with afd_patch.activated(role="attention", ffn="unix:/nowhere/ffn.sock", connect_timeout=0.5):
        build(model)
