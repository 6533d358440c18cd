"""Construction of decoder layers: what a role does not own is never built with storage, and gives way to a stand-in.

Native constructors run untouched, with the arguments they got. While the main model of an active role is built:

* attention role: FFN classes are constructed on the meta device, so every native attribute exists and no FFN weight
  is ever allocated; with `AFD_GATE=attention`, the experts only, and dense layers and routers are built as they are;
* FFN role: attention classes are not constructed at all (no KV registration, no rope cache, no attention backend
  needed), and every parameter outside of the FFN modules goes to the meta device as it is registered.

When the model is complete and before any weight is read, ``ModelBuild.finish`` puts the stand-ins in place. Everything
that is switched on for a construction is switched off when it ends, also on an exception. Draft models of speculative
decoding reuse the same classes; they are no main model and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from afd_patch import boundaries
from afd_patch.errors import UnsupportedError
from afd_patch.patch_manager import Patch, host

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig
    from afd_patch.patches.model_build import ModelBuild

#: The main model that is being loaded in this thread, set by ``model_load.py``.
CURRENT_BUILD: ContextVar[ModelBuild | None] = ContextVar("afd_patch_current_build", default=None)


#: What holds the experts of a mixture of experts, in every family.
_ROUTED_EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"


def patches(config: AFDConfig) -> list[Patch]:
    # By target: families share classes.
    layer_patches = {
        patch.target: patch
        for table in boundaries.TABLES
        for patch in (
            _constructor(table.decoder, _decoder_layer, "knows which module is a layer's FFN, and counts the layers"),
            *(_constructor(name, _ffn_module, "its weights belong to the FFN role only") for name in table.ffn),
            *(_constructor(name, _attention_module, "the FFN role has no attention") for name in table.attention),
        )
    }
    if config.gate == config.role == "attention":
        layer_patches[_ROUTED_EXPERTS] = _constructor(
            _ROUTED_EXPERTS, _routed_experts, "the attention role runs the router and has no experts"
        )
    return [
        *layer_patches.values(),
        Patch(
            name="construction.initialize_model",
            target="vllm.model_executor.model_loader.utils:initialize_model",
            make=host(_initialize_model),
            params=("vllm_config", "model_config"),
            why="after it the native model is complete and no weight was read: the moment for the stand-ins",
            upstream="vllm/model_executor/model_loader/utils.py initialize_model, called by every loader",
            removal="a vLLM hook between model construction and weight loading",
        ),
    ]


def patch_name(target: str) -> str:
    """The name of the patch of the class ``module:Class``."""
    module, _, cls = target.partition(":")
    return f"construction.{module.rpartition('.')[2]}.{cls}"


def _constructor(target: str, wrapper: Any, why: str) -> Patch:
    module, _, cls = target.partition(":")
    return Patch(
        name=patch_name(target),
        target=f"{target}.__init__",
        make=host(wrapper),
        why=f"{cls}: {why}",
        upstream=f"{module.replace('.', '/')}.py {cls}.__init__",
        removal="a vLLM option that builds a model without its FFN, or without its attention",
    )


def _decoder_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    build = CURRENT_BUILD.get()
    if build is None or not build.constructing:
        return wrapped(*args, **kwargs)
    with build.decoder_layer(instance):
        return wrapped(*args, **kwargs)


def _ffn_module(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    build = CURRENT_BUILD.get()
    if build is None or not build.inside_layer:
        return wrapped(*args, **kwargs)
    with build.ffn_module(instance):
        return wrapped(*args, **kwargs)


def _routed_experts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    from afd_patch.patches.routed_build import RoutedBuild

    build = CURRENT_BUILD.get()
    if not isinstance(build, RoutedBuild) or not build.inside_layer:
        return wrapped(*args, **kwargs)
    with build.routed_experts(instance):
        return wrapped(*args, **kwargs)


def _attention_module(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    build = CURRENT_BUILD.get()
    if build is None or not build.inside_layer or build.role == "attention":
        return wrapped(*args, **kwargs)
    build.leave_out_attention(instance)


def _initialize_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    build = CURRENT_BUILD.get()
    if build is None:
        return wrapped(*args, **kwargs)
    with build.construction(), _native_refusal_of_quantisation(build.vllm_config):
        model = wrapped(*args, **kwargs)
        _require_kernels(model, build.vllm_config)
    build.finish(model)
    return model


@contextmanager
def _native_refusal_of_quantisation(vllm_config: Any) -> Iterator[None]:
    """vLLM looks for a kernel when it constructs a quantised layer; what it says without one becomes our sentence."""
    method = vllm_config.model_config.quantization
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        if method is None:
            raise
        raise UnsupportedError(
            f"vLLM itself cannot run {method} weights like these on this {vllm_config.device_config.device_type}: "
            f"{' '.join(str(error).split()).rstrip('.')}; use other weights, or a machine that vLLM has kernels for"
        ) from error


def _require_kernels(model: Any, vllm_config: Any) -> None:
    """Raise ``ValueError`` for what vLLM for CPU would only say after loading: no fp8 kernel for the experts."""
    for module in model.modules() if vllm_config.device_config.device_type == "cpu" else ():
        backend = getattr(getattr(module, "quant_method", None), "fp8_backend", None)
        if backend is not None and backend.name == "NONE":
            raise ValueError(f"Unsupported FP8 MoE backend: {backend.value}")
