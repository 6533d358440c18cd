"""Loading the main model of a role: the barrier before it, and the proof after it.

Before anything is built, every patch that this model needs must be in effect, and the engine must have been configured
for the same role as this process. After the native load, the role must hold exactly what it owns; one INFO line says
so. A process that cannot prove it stops.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_patch import boundaries
from afd_patch.attention import connections
from afd_patch.errors import PatchNotApplied
from afd_patch.hosting import give_back_memory
from afd_patch.identity import identify
from afd_patch.patch_manager import Patch, host
from afd_patch.patches.construction import CURRENT_BUILD, patch_name
from afd_patch.patches.engine_config import ADDITIONAL_CONFIG_KEY

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.config import AFDConfig
    from afd_patch.patches.model_build import ModelBuild

logger = logging.getLogger("vllm.afd_patch")

# Finished builds of the FFN role, by id of their VllmConfig, until the runner takes them.
_loaded: dict[int, ModelBuild] = {}


def patches(config: AFDConfig) -> list[Patch]:
    return [
        Patch(
            name="model_load.load_model",
            target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
            make=host(_load_model(config)),
            params=("vllm_config", "model_config"),
            why="a role's model is built and loaded inside one scope, with a check on either side",
            upstream="vllm/model_executor/model_loader/base_loader.py BaseModelLoader.load_model",
            removal="none while roles exist: this is where a process proves what it serves",
        )
    ]


def _load_model(config: AFDConfig) -> Callable[..., Any]:
    def load_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        model_config = kwargs["model_config"] if "model_config" in kwargs else args[1]
        if is_draft(vllm_config, model_config):
            return wrapped(*args, **kwargs)
        boundary = boundaries.find(model_config.hf_config.architectures[0])
        _require_agreement(config, vllm_config)
        _require_patches(boundary)
        identity = identify(vllm_config, boundary, config)
        build = _build_class(config, boundary, vllm_config)(config.role, boundary, vllm_config, identity)
        connector = None
        if config.role == "attention":
            from afd_patch.attention.connect import open_connection

            connector = open_connection(config, vllm_config, identity)
        token = CURRENT_BUILD.set(build)
        try:
            model = wrapped(*args, **kwargs)
        finally:
            CURRENT_BUILD.reset(token)
        build.check_ownership(model)
        build.forget_missing_layers(model)
        give_back_memory()
        if connector is not None:
            connections.note_crossing(vllm_config.compilation_config.static_forward_context, build.crossing)
            connector.wait_ready()
        else:
            _loaded[id(vllm_config)] = build
        _log_proof(config, build, model)
        return model

    return load_model


def _build_class(config: AFDConfig, boundary: Boundary, vllm_config: Any) -> type[ModelBuild]:
    from afd_patch.patches.model_build import ModelBuild
    from afd_patch.patches.routed_build import RoutedBuild
    from afd_patch.patches.summed_build import SummedBuild

    if config.gate == "attention":
        return RoutedBuild
    return SummedBuild if boundary.router is not None and boundary.end_is_fused(vllm_config) else ModelBuild


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether this is the draft model of speculative decoding, which keeps its own FFN."""
    return model_config is not vllm_config.model_config or model_config.runner_type == "draft"


def _require_agreement(config: AFDConfig, vllm_config: Any) -> None:
    key = vllm_config.additional_config
    configured = key.get(ADDITIONAL_CONFIG_KEY) if isinstance(key, dict) else None
    if configured != config.graph_key():
        raise PatchNotApplied(
            f"this process is active as {config.graph_key()} and its engine was configured as {configured}; start all "
            "processes of an engine with the same AFD_* environment"
        )


def _require_patches(boundary: Boundary) -> None:
    """Every general patch, and those of this model's family; other families may be pending for ever."""
    from afd_patch import activation

    active = activation.current()
    if active is None:
        raise PatchNotApplied("this process is not active any more; activate it before building a model")
    import_now(boundary)
    others = {patch_name(name) for table in boundaries.TABLES if table is not boundary for name in table.classes}
    own = {patch_name(name) for name in boundary.classes}
    active.manager.require_applied([s.name for s in active.manager.status() if s.name in own or s.name not in others])


def import_now(boundary: Boundary) -> None:
    """Import the modules of this family and of the loaders, so that their patches are in effect or fail here."""
    modules = {name.partition(":")[0] for name in boundary.classes}
    # A worker process configures no engine, and not every platform's worker is made of vLLM's own.
    modules |= {"vllm.engine.arg_utils", "vllm.v1.worker.gpu_worker"}
    for module in sorted(modules):
        importlib.import_module(module)


def _log_proof(config: AFDConfig, build: ModelBuild, model: Any) -> None:
    import vllm

    from afd_patch import activation

    active = activation.current()
    applied = sum(s.state.name == "APPLIED" for s in active.manager.status()) if active else 0
    logger.info(
        "AFD %s: vLLM %s, %d patches in effect, %s %d == layers that cross %d, foreign parameters 0, "
        "own checkpoint tensors %d, all loaded, %d left to the other role%s",
        config.role, vllm.__version__, applied, "proxies" if config.role == "attention" else "FFN modules",
        len(build.layers), build.crossing, build.tensors_loaded, build.tensors_left, _rank_of_several(),
    )  # fmt: skip


def _rank_of_several() -> str:
    """Which share of its tensors this process holds, where it is not all of them."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return "" if group.world_size == 1 else f", tensor-parallel rank {group.rank_in_group} of {group.world_size}"


def take_loaded(vllm_config: Any) -> ModelBuild:
    """The finished build of ``vllm_config``'s main model, once; for the FFN role, which runs its layers."""
    return _loaded.pop(id(vllm_config))
