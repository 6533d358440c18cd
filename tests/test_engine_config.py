"""Every refusal of ``patches/engine_config.py``: said together, each with its way out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from afd_patch import boundaries
from afd_patch.config import AFDConfig
from afd_patch.errors import UnsupportedError
from afd_patch.ffn.runner import configure
from afd_patch.patches.engine_config import (
    ADDITIONAL_CONFIG_KEY,
    SPECULATIVE_METHODS,
    check_supported,
    prepare,
)

ATTENTION = AFDConfig.build(role="attention", ffn="unix:/a.sock")
ROUTER = AFDConfig.build(role="attention", ffn="unix:/a.sock", gate="attention")


def vllm_config(**changes: Any) -> SimpleNamespace:
    """The parts of a ``VllmConfig`` that are looked at; ``changes`` are ``part__field=value``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
            hf_text_config=SimpleNamespace(n_shared_experts=1),
            model_impl="auto",
            runner_type="generate",
            convert_type="none",
            quantization=None,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes=1,
            distributed_executor_backend="mp",
            use_sequence_parallel_moe=False,
            enable_expert_parallel=False,
            enable_eplb=False,
            enable_dbo=False,
        ),
        load_config=SimpleNamespace(load_format="auto", safetensors_load_strategy=None, model_loader_extra_config={}),
        compilation_config=SimpleNamespace(splitting_ops=None, mode=None),
        device_config=SimpleNamespace(device_type="cpu"),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        additional_config={},
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(getattr(config, part), field, value)
        else:
            setattr(config, part, value)
    return config


def check(config: SimpleNamespace, afd: AFDConfig = ATTENTION) -> None:
    check_supported(afd, config, boundaries.find("Qwen3MoeForCausalLM"))


def test_the_plain_case_is_supported() -> None:
    check(vllm_config())
    for method in SPECULATIVE_METHODS:
        check(vllm_config(speculative_config=SimpleNamespace(method=method)))
    check(vllm_config(parallel_config__tensor_parallel_size=4))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"parallel_config__tensor_parallel_size": 2, "parallel_config__distributed_executor_backend": "ray"},
            "--distributed-executor-backend ray",
        ),
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"parallel_config__nnodes": 2}, "--nnodes 2"),
        ({"parallel_config__use_sequence_parallel_moe": True}, "sequence-parallel MoE"),
        ({"parallel_config__enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"parallel_config__enable_eplb": True}, "--enable-eplb"),
        ({"parallel_config__enable_dbo": True}, "--enable-dbo"),
        ({"load_config__load_format": "tensorizer"}, "--load-format tensorizer"),
        ({"load_config__safetensors_load_strategy": "prefetch"}, "--safetensors-load-strategy prefetch"),
        ({"load_config__model_loader_extra_config": {"enable_multithread_load": True}}, "enable_multithread_load"),
        ({"load_config__load_format": "sharded_state"}, "--load-format sharded_state"),
        ({"model_config__model_impl": "transformers"}, "--model-impl transformers"),
        ({"model_config__convert_type": "classify"}, "--convert classify"),
        ({"lora_config": object()}, "--enable-lora was not tried with a mixture of experts"),
        ({"speculative_config": SimpleNamespace(method="medusa")}, "'medusa'"),
    ],
)
def test_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(vllm_config(**changes))
    message = str(caught.value)
    assert message.startswith("Qwen3MoeForCausalLM cannot run in the attention role like this: ")
    assert expected in message


def test_lora_is_for_dense_models() -> None:
    config = vllm_config(lora_config=object())
    check_supported(ATTENTION, config, boundaries.find("LlamaForCausalLM"))


def test_all_reasons_are_said_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"--pipeline-parallel-size 2 .*; .*--load-format tensorizer"):
        check(vllm_config(parallel_config__pipeline_parallel_size=2, load_config__load_format="tensorizer"))


def test_the_role_is_added_to_what_the_user_configured() -> None:
    config = vllm_config(additional_config={"theirs": 1})
    prepare(ATTENTION, config)
    assert config.additional_config == {"theirs": 1, ADDITIONAL_CONFIG_KEY: ATTENTION.graph_key()}


def test_a_router_in_the_attention_role_needs_a_router() -> None:
    check(vllm_config(), ROUTER)
    for name, table in ((name, boundaries.find(name)) for name in boundaries.architectures()):
        config = vllm_config(model_config__multimodal_config=None)
        config.model_config.hf_config.architectures = [name]
        if table.router:
            check_supported(ROUTER, config, table)
        else:
            reason = "the cut through these experts was not built" if table.moe else "nothing would cross"
            with pytest.raises(UnsupportedError, match=f"{name} .*{reason}; use AFD_GATE=ffn"):
                check_supported(ROUTER, config, table)


def test_several_ranks_where_the_native_runner_would_sum_over_them_again() -> None:
    ranks = vllm_config(parallel_config__tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match="AFD_GATE=attention was not built for several"):
        check(ranks, ROUTER)
    check_supported(ATTENTION, ranks, boundaries.find("DeepseekV3ForCausalLM"))


def test_graphs_are_split_at_the_hand_off_where_they_are_split_at_all() -> None:
    pieces = vllm_config(compilation_config__splitting_ops=["vllm::unified_attention"])
    prepare(ATTENTION, pieces)
    assert pieces.compilation_config.splitting_ops == [
        "vllm::unified_attention",
        "afd_patch::remote_ffn",
        "afd_patch::remote_ffn_ids",
        "afd_patch::remote_summands",
    ]
    routed = vllm_config(compilation_config__splitting_ops=["vllm::unified_attention"])
    prepare(ROUTER, routed)
    assert routed.compilation_config.splitting_ops[1:] == [
        "afd_patch::remote_experts",
        "vllm::moe_forward",
        "vllm::moe_forward_shared",
    ]
    whole = vllm_config(compilation_config__splitting_ops=[])
    prepare(ATTENTION, whole)
    assert whole.compilation_config.splitting_ops == []


@dataclass
class Engine:
    """What ``configure`` turns off of vLLM's ``EngineArgs``, and what it must leave alone."""

    model: str = "m"
    speculative_config: object = "draft"
    enable_lora: bool = True
    kv_transfer_config: object = "transfer"
    max_num_seqs: int = 256
    kv_cache_memory_bytes: int = 1 << 40
    skip_tokenizer_init: bool = False

    def create_engine_config(self) -> Engine:
        return self


def test_drafts_adapters_and_the_kv_cache_are_not_for_the_ffn_role() -> None:
    given = Engine()
    assert configure(given) == Engine("m", None, False, None, 1, 1 << 20, True)  # type: ignore[arg-type]
    assert given == Engine(), "the caller's stays as it is"
