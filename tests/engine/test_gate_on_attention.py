"""``AFD_GATE=attention``: the router runs in the attention role, and the FFN role has experts and nothing else.

Each architecture is bit-identical to stock vLLM with prefill and decode in one batch, and every MoE layer hands over
once in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import Child
from tests.engine.cpu_help import helped
from tests.engine.engines import ENGINE, PROMPTS, ask, build, ffn_server, remote_calls
from tests.engine.test_ownership import assert_shared, describe, record_reads

#: Layers with a mixture of experts; the others of four are dense.
MOE_LAYERS = {
    "deepseek_v1": 3,
    "deepseek_v2": 3,
    "deepseek_v3": 3,
    "deepseek_v32": 2,
    "ernie4_5_moe": 3,
    "glm4_moe": 3,
    "glm_moe_dsa": 2,
    "gpt_oss": 4,
    "llama4": 2,
    "minimax_m2": 4,
    "mixtral": 4,
    "olmoe": 4,
    "qwen2_moe": 3,
    "qwen3_5_moe": 4,
    "qwen3_5_moe_text": 4,
    "qwen3_moe": 3,
    "qwen3_next": 3,
    "step3_text": 3,
}
#: Routers with and without a bias, in places of their own; shared experts with and without a gate; dense layers.
OWNERSHIP = ("deepseek_v3", "ernie4_5_moe", "minimax_m2", "qwen2_moe", "step3_text")
#: A router that reads unrounded rows; shared experts that end in a product. Compiled runs cost a minute each.
COMPILED = ("glm4_moe", "qwen2_moe")
GATE = {"AFD_GATE": "attention"}


@contextmanager
def serving(architecture: str, path: str, endpoint: str, **engine: Any) -> Iterator[Child]:
    server = Child(helped, architecture, ffn_server, path, endpoint, gate="attention", **engine)
    try:
        yield server
    finally:
        server.stop()


def observe(path: str, **engine: Any) -> dict[str, Any]:
    """What an engine answers when prompts wait for one another, and how often it handed over meanwhile."""
    read = record_reads()
    llm = build(path, **{"max_num_batched_tokens": 64, "max_num_seqs": 4, **engine})
    steps = 0
    native = llm.llm_engine.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        return native()

    llm.llm_engine.step = step
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    result = held(model, llm.llm_engine.vllm_config, read)
    before = remote_calls()
    return {**result, "outputs": ask(llm, PROMPTS), "calls": remote_calls() - before, "steps": steps}


def held(model: Any, vllm_config: Any, read: list[str]) -> dict[str, Any]:
    """What a model holds, in a role or in none."""
    gates = sum(type(module).__name__ == "GateLinear" for module in model.modules())
    return {**describe(model, vllm_config, read), "gates": gates}


def experts_only(path: str, endpoint: str) -> dict[str, Any]:
    """What the FFN role holds, and what it says when it is asked for a dense layer."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    import afd_patch
    from afd_patch.errors import ConnectorError
    from afd_patch.ffn.runner import FFNRunner, configure

    read = record_reads()
    afd_patch.activate(role="ffn", listen=endpoint, gate="attention")
    vllm_config = configure(EngineArgs(model=path, **ENGINE))
    runner = FFNRunner(vllm_config)
    result = held(runner._executor.driver_worker.worker.model_runner.model, vllm_config, read)
    dense = sorted(set(range(4)) - set(runner.layers))
    refusals = []
    for layer in dense:
        with pytest.raises(ConnectorError) as caught:
            runner.compute_ffn_output(layer, torch.zeros(1, 256 + 8, dtype=torch.bfloat16))
        refusals.append(str(caught.value))
    for number in (-1, 8):  # a kernel would read whatever is there
        request = torch.zeros(3, 256 + 8, dtype=torch.bfloat16)
        request[1, 256:].view(torch.int32)[3] = number
        with pytest.raises(ConnectorError, match=r"the routing names experts from .*, and there are 8"):
            runner.compute_ffn_output(runner.layers[0], request)
    return {**result, "layers": list(runner.layers), "dense": dense, "refusals": refusals}


@pytest.mark.parametrize("architecture", MOE_LAYERS)
def test_exact(architecture: str, checkpoint: Any, endpoint: str, attention: dict[str, str], tmp_path: Path) -> None:
    path = checkpoint(architecture)
    with serving(architecture, path, endpoint) as server:
        child = Child(helped, architecture, observe, path, env={**attention, **GATE})
        split = child.result()
    stock = Child(helped, architecture, observe, path).result()
    crossing = MOE_LAYERS[architecture]
    assert split["outputs"] == stock["outputs"]
    assert split["calls"] == crossing * split["steps"]
    assert split["gates"] == stock["gates"] == crossing
    assert f"proxies {crossing} == layers that cross {crossing}, foreign parameters 0" in child.text()
    assert f"FFN modules {crossing} == layers that cross {crossing}, foreign parameters 0" in server.text()
    if architecture in OWNERSHIP:
        ffn = Child(helped, architecture, experts_only, path, f"unix:{tmp_path}/other.sock").result()
        check_ownership(split, ffn, stock, crossing)


def check_ownership(split: dict[str, Any], ffn: dict[str, Any], stock: dict[str, Any], crossing: int) -> None:
    for role in (split, ffn):
        assert all(device == "cpu" for _, device in role["parameters"].values())
    assert_shared(split["parameters"], ffn["parameters"], stock["parameters"])
    assert not set(split["read"]) & set(ffn["read"]), "no tensor is read by both"
    assert sorted(split["read"] + ffn["read"]) == sorted(stock["read"])
    assert ffn["gates"] == 0, "the FFN role has no router to run"
    assert split["moe layers"] == ffn["moe layers"] == stock["moe layers"], "both have the native runners"
    assert len(ffn["layers"]) == crossing
    assert len(ffn["dense"]) == 4 - crossing
    for layer, refusal in zip(ffn["dense"], ffn["refusals"], strict=True):
        assert refusal.startswith(f"layer {layer} is not served here (layers: ({ffn['layers'][0]}, ")
        assert "dense layers run in the attention role (AFD_GATE=attention)" in refusal
        assert f"model.layers.{layer}.mlp.down_proj.weight" in split["parameters"]
    assert not any(".experts." in name or "shared_expert" in name for name in split["parameters"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(dtype: str, checkpoint: Any, endpoint: str, attention: dict[str, str]) -> None:
    """In fp16, DeepSeek divides the shared result instead of multiplying the routed one, and scales dense layers."""
    path = checkpoint("deepseek_v2")
    with serving("deepseek_v2", path, endpoint, dtype=dtype):
        split = Child(observe, path, env={**attention, **GATE}, dtype=dtype).result()
    assert split["outputs"] == Child(observe, path, dtype=dtype).result()["outputs"]
    assert split["calls"] == 3 * split["steps"]


@pytest.mark.parametrize("architecture", COMPILED)
def test_exact_compiled(
    architecture: str, checkpoint: Any, endpoint: str, attention: dict[str, str], tmp_path: Path
) -> None:
    path = checkpoint(architecture)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with serving(architecture, path, endpoint, env=cache, enforce_eager=False):
        sides = [
            Child(helped, architecture, observe, path, env=env, enforce_eager=False)
            for env in ({**cache, **attention, **GATE}, cache)
        ]
        split, stock = [side.result() for side in sides]
    assert split["outputs"] == stock["outputs"]
    assert split["calls"] == MOE_LAYERS[architecture] * split["steps"]


def test_routers_in_different_places_are_refused(checkpoint: Any, endpoint: str, attention: dict[str, str]) -> None:
    path = checkpoint("qwen3_moe")
    with serving("qwen3_moe", path, endpoint):
        kind, message = Child(build, path, env=attention).outcome()
    assert kind == "exit"
    assert "gate: 'attention' here, 'ffn' there; request_columns: 264 here, 256 there" in message


def changed(path: str, change: str) -> Any:
    """A model that is built differently from what its table or its configuration says."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    native = MoERunner.__init__

    def init(self: Any, **kwargs: Any) -> None:
        if change == "transform":
            import torch

            kwargs["routed_input_transform"] = torch.nn.Identity()
        if change == "top_k":
            kwargs["moe_config"].experts_per_token = 3
        native(self, **kwargs)

    MoERunner.__init__ = init
    if change == "monolithic":
        UnquantizedFusedMoEMethod.is_monolithic = True
    build(path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("transform", "its rows are transformed around the experts"),
        ("top_k", "it has 3 experts per row and no shared experts, and its configuration says otherwise"),
        ("monolithic", "the kernel of its experts does the routing itself"),
    ],
)
def test_a_mixture_that_cannot_be_cut_is_refused(
    change: str, expected: str, checkpoint: Any, endpoint: str, attention: dict[str, str]
) -> None:
    path = checkpoint("qwen3_moe")
    with serving("qwen3_moe", path, endpoint):
        child = Child(changed, path, change, env={**attention, **GATE})
        kind, message = child.outcome()
    assert kind == "error"
    assert f"{expected}, so its router cannot run in the attention role; use AFD_GATE=ffn" in message
    assert "Loading weights took" not in child.text()
