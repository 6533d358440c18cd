"""DeepSeek V4: token ids cross beside the rows, the two roles share the model, and what cannot run is refused.

Stock vLLM 0.32 for CPU has the kernels of this model in its build with AMX only, so without AMX it does not run as a
whole. What is compared here are the models as they are built and loaded; each FFN, called the way the native decoder
layer calls it, on stock vLLM's own module, in the FFN role, and through the stand-in and a connection; and generations
of a model whose attention is replaced. Where the processor has no kernel for them, choosing experts and packing a
weight of attention are made up for, the same way on all sides (``cpu_help.deepseek_v4``).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.errors import WeightError
from tests.engine.children import Child
from tests.engine.cpu_help import deepseek_v4, deepseek_v4_kernels
from tests.engine.engines import ENGINE, build, ffn_server
from tests.engine.test_ownership import assert_shared, describe, record_reads
from tests.engine.test_refusals import NOWHERE
from tests.engine.test_v2_runner import ENV, in_fresh_interpreter

LAYERS = 3
TABLE = boundaries.find("DeepseekV4ForCausalLM")


def rows(count: int = 37) -> Any:
    import torch

    return torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


def ids(count: int = 37) -> Any:
    import torch

    return torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(count)).to(torch.int32)


def loaded(path: str) -> tuple[Any, Any, dict[str, Any]]:
    """A worker's model of whichever role the environment says, its configuration, and what it holds and has read."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from afd_patch import plugin

    deepseek_v4()
    plugin.register()
    read = record_reads()
    vllm_config = EngineArgs(model=path, **ENGINE).create_engine_config()
    model = UniProcExecutor(vllm_config).driver_worker.worker.model_runner.model
    return model, vllm_config, {**describe(model, vllm_config, read), "digests": digests(model)}


def digests(model: Any) -> dict[str, str]:
    import torch

    return {
        name: hashlib.sha256(p.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


def outputs_of(layers: Any, vllm_config: Any) -> list[Any]:
    """What each layer's FFN makes of many rows and of one, called as the native layer calls it."""
    import torch
    from vllm.forward_context import set_forward_context

    found = []
    with torch.inference_mode():
        for count in (37, 1):
            with set_forward_context(None, vllm_config, num_tokens=count):
                found += [layer.ffn(rows(count), ids(count)).tolist() for layer in layers]
    return found


def stock(path: str) -> dict[str, Any]:
    model, vllm_config, result = loaded(path)
    layers = model.model.layers
    result["hashed"] = [layer.ffn.gate.tid2eid is not None for layer in layers]
    return {**result, "outputs": outputs_of(layers, vllm_config)}


def attention_role(path: str) -> dict[str, Any]:
    """The same through stand-ins and a connection; and what happens with ids that are not what was agreed."""
    import torch
    from vllm.forward_context import set_forward_context

    from afd_patch.attention import connections
    from afd_patch.errors import ConnectorError

    model, vllm_config, result = loaded(path)
    layers = model.model.layers
    result["stand-in"] = [base.__name__ for base in type(layers[0].ffn).__mro__[:3]]
    result["outputs"] = outputs_of(layers, vllm_config)
    calls = connections.total_calls()
    messages = []
    for wrong in (None, ids(5), ids(37).long(), ids(37).unsqueeze(1), ids(37).float()):
        with set_forward_context(None, vllm_config, num_tokens=37), torch.inference_mode():
            try:
                layers[1].ffn(rows(), wrong)
            except ConnectorError as error:
                messages.append(str(error))
    return {**result, "messages": messages, "calls": calls, "calls after": connections.total_calls()}


def ffn_role(path: str, endpoint: str) -> dict[str, Any]:
    """What the FFN role computes, with ids that crossed as side columns."""
    from vllm.engine.arg_utils import EngineArgs

    import afd_patch
    from afd_patch.connectors.columns import joined
    from afd_patch.ffn.runner import FFNRunner, configure

    deepseek_v4_kernels()
    read = record_reads()
    afd_patch.activate(role="ffn", listen=endpoint)
    vllm_config = configure(EngineArgs(model=path, **ENGINE))
    runner = FFNRunner(vllm_config)
    model = runner._executor.driver_worker.worker.model_runner.model
    outputs = [
        runner.compute_ffn_output(layer, joined(rows(count), (ids(count).unsqueeze(1),))).tolist()
        for count in (37, 1)
        for layer in runner.layers
    ]
    return {**describe(model, vllm_config, read), "digests": digests(model), "outputs": outputs}


def helped_server(path: str, endpoint: str) -> None:
    deepseek_v4_kernels()
    ffn_server(path, endpoint)


@pytest.fixture(scope="module")
def sides(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path, folder = checkpoint("deepseek_v4"), tmp_path_factory.mktemp("v4")
    endpoint = f"unix:{folder}/ffn.sock"
    env = {"AFD_ROLE": "attention", "AFD_FFN": endpoint, "AFD_CONNECT_TIMEOUT": "120"}
    server = Child(helped_server, path, endpoint)
    try:
        att = Child(attention_role, path, env=env).result()
    finally:
        server.stop()
    ffn = Child(ffn_role, path, f"unix:{folder}/other.sock").result()
    return {"attention": att, "ffn": ffn, "stock": Child(stock, path).result()}


def test_the_roles_share_the_model_without_overlap(sides: Any) -> None:
    att, ffn, native = sides["attention"], sides["ffn"], sides["stock"]
    for what in ("parameters", "digests"):
        assert_shared(att[what], ffn[what], native[what])
    assert all(".ffn." in name for name in ffn["parameters"])
    assert not set(att["read"]) & set(ffn["read"]), "no tensor is read by both"
    assert sorted(att["read"] + ffn["read"]) == sorted(native["read"])
    assert not att["moe layers"]
    assert ffn["moe layers"] == native["moe layers"]
    assert sorted(att["registered"] + ffn["registered"]) == native["registered"]
    assert any("tid2eid" in name for name in ffn["parameters"])
    assert any("e_score_correction_bias" in name for name in ffn["parameters"])
    assert sum("hc_" in name for name in att["parameters"]) == 6 * LAYERS + 3


def test_the_ffn_role_computes_what_the_native_module_does(sides: Any) -> None:
    assert sides["stock"]["hashed"] == [True, False, False]
    assert sides["ffn"]["outputs"] == sides["stock"]["outputs"]


def test_the_stand_in_gives_the_native_result_through_a_connection(sides: Any) -> None:
    assert sides["attention"]["stand-in"] == ["RemoteIdsDeepseekV4MoE", "RemoteIdsFFN", "RemoteFFN"]
    assert sides["attention"]["outputs"] == sides["stock"]["outputs"]
    assert sides["attention"]["calls"] == 2 * LAYERS


def test_ids_that_were_not_agreed_are_refused_before_anything_is_sent(sides: Any) -> None:
    missing, *others = sides["attention"]["messages"]
    assert "layer 1: input_ids is not given, and its FFN takes torch.int32 (37,)" in missing
    given = ["torch.int32 (5,)", "torch.int64 (37,)", "torch.int32 (37, 1)", "torch.float32 (37,)"]
    assert [what in message for what, message in zip(given, others, strict=True)] == [True] * 4
    assert sides["attention"]["calls after"] == sides["attention"]["calls"]


def test_tokens_without_native_attention(checkpoint: Any, endpoint: str, attention: dict[str, str]) -> None:
    """Everything around attention is native: the model, its runner, and the ids that it hands to its layers."""
    path, needs = checkpoint("deepseek_v4"), "deepseek_v4_without_attention"
    server = Child(helped_server, path, endpoint)
    try:
        split = Child(in_fresh_interpreter, path, needs, env={**ENV, **attention}).result()
    finally:
        server.stop()
    native = Child(in_fresh_interpreter, path, needs, env=ENV).result()
    assert native["calls"] == 0
    assert split["calls"] > 0
    assert split["calls"] % LAYERS == 0
    assert split["outputs"] == native["outputs"]


def unhelped(path: str) -> bool:
    """Stock vLLM as it is; ``True`` where its build has the kernel that packs a weight of attention."""
    import torch

    if hasattr(torch.ops._C, "convert_weight_packed"):
        return True
    build(path)
    return False


def test_stock_vllm_stops_where_it_has_no_kernels(checkpoint: Any) -> None:
    """Why nothing is generated here, in the words of the README."""
    kind, message = Child(unhelped, checkpoint("deepseek_v4")).outcome()
    if (kind, message) == ("value", True):
        pytest.skip("this processor has AMX")
    assert kind == "error"
    assert "'_C' object has no attribute 'convert_weight_packed'" in message


# -- refusals -------------------------------------------------------------------------------------------------------


def reasons(
    gate: str = "ffn", mode: str = "NONE", device: str = "cpu", ranks: int = 1, moe_backend: str = "auto"
) -> list[str]:
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, multimodal_config=None, hf_text_config=SimpleNamespace()),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name=mode)),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        device_config=SimpleNamespace(device_type=device),
        kernel_config=SimpleNamespace(moe_backend=moe_backend),
    )
    return list(TABLE.refusals(vllm_config, gate))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"gate": "attention"}, "its router cannot run in the attention role"),
        ({"mode": "DYNAMO_TRACE_ONCE"}, "compiled, it was not compared with stock vLLM; add --enforce-eager"),
        ({"mode": "VLLM_COMPILE"}, "compiled, it was not compared with stock vLLM; add --enforce-eager"),
        ({"device": "cuda"}, "on cuda vLLM builds it from other classes than those of vllm.models.deepseek_v4.cpu"),
        ({"device": "xpu"}, "on xpu vLLM builds it from other classes"),
        ({"ranks": 2}, "was not tried with several tensor-parallel ranks; use one rank"),
        ({"moe_backend": "deep_gemm_mega_moe"}, "--moe-backend deep_gemm_mega_moe takes the place of the experts"),
        ({"moe_backend": "aiter_mega_moe"}, "--moe-backend aiter_mega_moe takes the place of the experts"),
    ],
)
def test_one_reason_each(setting: dict[str, Any], expected: str) -> None:
    assert not reasons()
    (reason,) = reasons(**setting)
    assert expected in reason


@pytest.mark.parametrize(
    ("env", "engine", "expected"),
    [
        ({"AFD_GATE": "attention"}, {}, "its router cannot run in the attention role"),
        # Left alone, vLLM does not compile this model, with or without --enforce-eager.
        ({"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}, {"enforce_eager": False}, "compiled, it was not compared with stock"),
        ({}, {"moe_backend": "deep_gemm_mega_moe"}, "--moe-backend deep_gemm_mega_moe takes the place"),
        ({}, {"tensor_parallel_size": 2}, "was not tried with several tensor-parallel ranks"),
    ],
)
def test_refused_before_anything_is_loaded(
    env: dict[str, str], engine: dict[str, Any], expected: str, checkpoint: Any
) -> None:
    nowhere = {**NOWHERE, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    kind, message = Child(build, checkpoint("deepseek_v4"), env={**nowhere, **env}, **engine).outcome()
    assert kind == "exit", message
    assert message.startswith("afd_patch: DeepseekV4ForCausalLM cannot run in the attention role like this: ")
    assert expected in message


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed.weight", "attention"),
        ("head.weight", "attention"),
        ("norm.weight", "attention"),
        ("hc_head_fn", "attention"),
        ("hc_head_base", "attention"),
        ("hc_head_scale", "attention"),
        ("layers.0.hc_attn_fn", "attention"),
        ("layers.0.hc_ffn_fn", "attention"),
        ("layers.0.hc_ffn_base", "attention"),
        ("layers.0.ffn_norm.weight", "attention"),
        ("layers.0.attn.indexer.compressor.wgate.weight", "attention"),
        ("layers.0.attn.wo_a.scale", "attention"),
        ("layers.0.ffn.gate.tid2eid", "ffn"),
        ("layers.2.ffn.gate.bias", "ffn"),
        ("layers.2.ffn.experts.63.w2.scale", "ffn"),
        ("layers.2.ffn.shared_experts.w1.weight", "ffn"),
        ("mtp.0.ffn.experts.0.w1.weight", "none"),
        ("mtp.0.hc_head_fn", "none"),
    ],
)
def test_owners(name: str, expected: str) -> None:
    assert TABLE.weights.owner(name, LAYERS) == expected


@pytest.mark.parametrize("name", ["layers.0.ffn_extra.weight", "layers.0.hc_mlp_fn", "hc_heads", "model.embed.weight"])
def test_unknown_names_are_quoted(name: str) -> None:
    with pytest.raises(WeightError, match=repr(name)):
        TABLE.weights.owner(name, LAYERS)


def test_columns() -> None:
    for itemsize, expected in ((2, (258, 256)), (4, (257, 256))):
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(hidden_size=256), dtype=SimpleNamespace(itemsize=itemsize)
        )
        given = SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(mode=None))
        assert TABLE.columns(given, "ffn") == expected


# -- formats without a kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["deepseek_v4_fp8", "deepseek_v4_fp4"])
def test_quantised_weights(architecture: str, checkpoint: Any, tmp_path: Path) -> None:
    """Where stock vLLM has no kernel, the FFN role says so; elsewhere it computes."""
    path = checkpoint(architecture)
    native, reason = Child(stock, path).outcome()
    kind, result = Child(ffn_role, path, f"unix:{tmp_path}/ffn.sock").outcome()
    if native == "value":
        assert kind == "value", result
        assert result["outputs"] == reason["outputs"]
    else:
        assert "kernel" in reason
        assert kind == "error"
        assert "UnsupportedError" in result
        assert "AMX" in result
