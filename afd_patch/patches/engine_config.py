"""Engine configuration: refuses what a role cannot do, and makes every process of the engine know its role.

The role goes into ``additional_config``: vLLM hashes it, so compiled artefacts of stock and AFD processes are never
mixed, and carries it to every child process, where ``model_load.py`` compares it with the child's own activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from afd_patch import boundaries
from afd_patch.errors import UnsupportedError
from afd_patch.identity import identify
from afd_patch.patch_manager import Patch, host

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.config import AFDConfig

#: Where the role is in ``VllmConfig.additional_config``.
ADDITIONAL_CONFIG_KEY = "afd_patch"

#: True while the FFN role configures its worker; everybody else who asks for a configuration wants an engine.
FOR_FFN_RUNNER: ContextVar[bool] = ContextVar("afd_patch_for_ffn_runner", default=False)

#: Ops with a hand-off, by where the router runs. On GPUs, vLLM's op around a mixture of experts has ours inside.
_HAND_OFFS = {
    "ffn": ("afd_patch::remote_ffn", "afd_patch::remote_ffn_ids", "afd_patch::remote_summands"),
    "attention": ("afd_patch::remote_experts", "vllm::moe_forward", "vllm::moe_forward_shared"),
}

#: Loaders that were tried with both roles.
LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
#: Strategies of the safetensors loader that read the tensors of the other role too.
WHOLE_FILES = ("eager", "prefetch")

#: Speculative methods that were tried: what drafts is on the attention side, with an FFN of its own.
SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")


def patches(config: AFDConfig) -> list[Patch]:
    return [
        Patch(
            name="engine_config.create",
            target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
            make=host(_create(config)),
            why="refuses unsupported settings before anything is loaded, and tells child processes and caches the role",
            upstream="vllm/engine/arg_utils.py EngineArgs.create_engine_config, the only way to a VllmConfig",
            removal="a plugin hook in vLLM for checking and extending the finished configuration",
        )
    ]


def _create(config: AFDConfig) -> Callable[..., Any]:
    def create_engine_config(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from afd_patch.activation import stopping

        with stopping():
            if config.role == "ffn" and not FOR_FFN_RUNNER.get():
                raise UnsupportedError(
                    "the ffn role is no vLLM engine, so LLM and vllm serve cannot have it; start an FFN server with: "
                    "python -m afd_patch.serve MODEL --role ffn --listen ENDPOINT"
                )
        vllm_config = wrapped(*args, **kwargs)
        with stopping():
            boundary = boundaries.find(vllm_config.model_config.hf_config.architectures[0])
            check_supported(config, vllm_config, boundary)
            prepare(config, vllm_config)
            if config.role == "attention":
                from afd_patch.attention.connect import preflight

                preflight(config, identify(vllm_config, boundary, config))
        return vllm_config

    return create_engine_config


def prepare(config: AFDConfig, vllm_config: Any) -> None:
    """Mark ``vllm_config`` as belonging to the role of ``config``."""
    present = vllm_config.additional_config
    if not isinstance(present, dict):
        raise UnsupportedError("additional_config is not a dict, so the role cannot be added to it; pass a JSON object")
    vllm_config.additional_config = {**present, ADDITIONAL_CONFIG_KEY: config.graph_key()}
    load = vllm_config.load_config
    if load.safetensors_load_strategy is None:
        load.safetensors_load_strategy = "lazy"  # on network file systems, the default reads whole files first
    compilation = vllm_config.compilation_config
    if config.role == "attention" and compilation.splitting_ops:
        # Graph pieces end before the hand-off and start after it.
        compilation.splitting_ops = [*compilation.splitting_ops, *_HAND_OFFS[config.gate]]


def check_supported(config: AFDConfig, vllm_config: Any, boundary: Boundary) -> None:
    """Raise ``UnsupportedError`` with every reason why this role cannot run ``vllm_config``."""
    reasons = [*_refusals(config, vllm_config), *boundary.refusals(vllm_config, config.gate)]
    if vllm_config.lora_config is not None and boundary.moe:
        reasons.append(
            "--enable-lora was not tried with a mixture of experts, because stock vLLM for CPU cannot run the two "
            "together; leave it out"
        )
    if reasons:
        raise UnsupportedError(
            f"{vllm_config.model_config.hf_config.architectures[0]} cannot run in the {config.role} role like this: "
            + "; ".join(reasons)
        )


def _refusals(config: AFDConfig, vllm_config: Any) -> Iterator[str]:
    model, parallel, speculative = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    for option, size, reason in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, "stock vLLM for CPU fails in the first forward"),
        (
            "--data-parallel-size",
            parallel.data_parallel_size,
            "start several attention roles, which can share FFN servers, instead",
        ),
        (
            "--prefill-context-parallel-size",
            getattr(parallel, "prefill_context_parallel_size", 1),
            "it was not tried with split roles",
        ),
        (
            "--decode-context-parallel-size",
            getattr(parallel, "decode_context_parallel_size", 1),
            "it was not tried with split roles",
        ),
        ("--nnodes", getattr(parallel, "nnodes", 1), "the tensor-parallel ranks of a role are on one host"),
    ):
        if size > 1:
            yield f"{option} {size} is not supported yet: {reason}; leave it at 1"
    backend = parallel.distributed_executor_backend
    if parallel.tensor_parallel_size > 1 and backend != "mp":
        yield f"--distributed-executor-backend {backend} was not tried with tensor parallelism; use mp"
    if getattr(parallel, "use_sequence_parallel_moe", False):
        yield (
            "sequence-parallel MoE gives each tensor-parallel rank other rows, and one copy of the same rows crosses; "
            "leave out --enable-expert-parallel"
        )
    if parallel.enable_expert_parallel:
        yield (
            "--enable-expert-parallel is not supported yet: with it, vLLM's CPU experts crash in the first forward; "
            "leave it out"
        )
    if parallel.enable_eplb:
        yield "--enable-eplb moves experts between ranks that the other role cannot see; leave it out"
    if parallel.enable_dbo:
        yield "--enable-dbo is not supported yet; leave it out"
    if vllm_config.load_config.load_format == "sharded_state":
        yield (
            "--load-format sharded_state was not tried with split roles, because vLLM for CPU cannot load what it "
            "saves like this: the weights that its kernels keep are missing ('Missing keys ... in loaded state'); "
            f"use one of: {', '.join(LOAD_FORMATS)}"
        )
    elif vllm_config.load_config.load_format not in LOAD_FORMATS:
        yield (
            f"--load-format {vllm_config.load_config.load_format} was not tried with split roles; "
            f"use one of: {', '.join(LOAD_FORMATS)}"
        )
    if vllm_config.load_config.safetensors_load_strategy in WHOLE_FILES:
        yield (
            f"--safetensors-load-strategy {vllm_config.load_config.safetensors_load_strategy} reads whole files, and a "
            "role reads its own tensors only; leave it out"
        )
    extra = vllm_config.load_config.model_loader_extra_config
    if isinstance(extra, dict) and extra.get("enable_multithread_load"):
        yield "enable_multithread_load reads whole files, and a role reads its own tensors only; leave it out"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        yield (
            "--weight-transfer-config lets a trainer change the weights of one role only; leave it out, and start both "
            "roles again with new weights"
        )
    if model.model_impl not in ("auto", "vllm"):
        yield f"--model-impl {model.model_impl} builds the layers outside of vLLM's own model code; use vllm"
    if speculative is not None and speculative.method not in SPECULATIVE_METHODS:
        yield (
            f"speculative method {speculative.method!r} was not tried with split roles; "
            f"use one of: {', '.join(SPECULATIVE_METHODS)}"
        )
    if model.convert_type == "classify":
        yield "--convert classify adds a head that no boundary table knows; use embed, or --runner generate"
