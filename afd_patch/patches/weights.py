"""Weights: which checkpoint tensors a role reads, the count of what was written, and that they stay.

Ownership is decided on checkpoint names, before any native mapping (stacked, fused, expert, renamed), by the model's
boundary table. Native loaders ask ``should_skip_weight`` before they read a tensor from a safetensors file, so what a
role does not own is not read from disk, and ``safetensors_weights_iterator`` keeps the kernel from reading it along;
``get_all_weights`` covers formats that do not ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_patch.errors import UnsupportedError
from afd_patch.patch_manager import Patch, host
from afd_patch.patches.construction import CURRENT_BUILD
from afd_patch.patches.readahead import TensorFiles

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig

_LOADERS = "vllm.model_executor.model_loader"


def patches(config: AFDConfig) -> list[Patch]:
    return [
        Patch(
            name="weights.should_skip_weight",
            target=f"{_LOADERS}.ep_weight_filter:should_skip_weight",
            make=host(_should_skip_weight),
            params=("weight_name",),
            why="a tensor of the other role is not read from disk",
            upstream="vllm/model_executor/model_loader/ep_weight_filter.py, asked before each safetensors read",
            removal="a name filter in vLLM's loaders that is not about expert ids only",
        ),
        Patch(
            name="weights.safetensors_weights_iterator",
            target=f"{_LOADERS}.weight_utils:safetensors_weights_iterator",
            make=host(_safetensors_weights_iterator),
            params=("hf_weights_files",),
            why="the kernel's read-ahead does not fetch tensors of the other role along",
            upstream="vllm/model_executor/model_loader/weight_utils.py, maps the files and reads through the mapping",
            removal="vLLM's safetensors loader asks the kernel for the tensors that it reads, and no others",
        ),
        Patch(
            name="weights.get_all_weights",
            target=f"{_LOADERS}.default_loader:DefaultModelLoader.get_all_weights",
            make=host(_get_all_weights),
            params=("model_config", "model"),
            why="formats that cannot skip a tensor before reading it are filtered after it",
            upstream="vllm/model_executor/model_loader/default_loader.py DefaultModelLoader.get_all_weights",
            removal="a name filter in vLLM's loaders that is not about expert ids only",
        ),
        *(
            Patch(
                name=f"weights.{loader}.load_weights",
                target=f"{_LOADERS}.{module}:{loader}.load_weights",
                make=host(_load_weights),
                params=("model", "model_config"),
                why="counts what is written, because vLLM does not notice a missing expert tensor",
                upstream=f"vllm/model_executor/model_loader/{module}.py {loader}.load_weights",
                removal="vLLM's own check for weights that were not initialised covers experts and linear layers",
            )
            for module, loader in (("default_loader", "DefaultModelLoader"), ("dummy_loader", "DummyModelLoader"))
        ),
        Patch(
            name="weights.reload_weights",
            target="vllm.v1.worker.gpu_worker:Worker.reload_weights",
            make=host(_reload_weights),
            why="other weights in one role only would be another model",
            upstream="vllm/v1/worker/gpu_worker.py Worker.reload_weights, called by name through collective_rpc",
            removal="a change of weights that both roles make between the same two forwards",
        ),
    ]


def _should_skip_weight(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    build = CURRENT_BUILD.get()
    name: str = kwargs["weight_name"] if "weight_name" in kwargs else args[0]
    if build is not None and build.skips(name):
        return True
    skip = bool(wrapped(*args, **kwargs))
    if build is not None and build.files is not None and not skip:
        build.files.fetch(name)
    return skip


def _safetensors_weights_iterator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    build = CURRENT_BUILD.get()
    if build is not None:
        build.files = TensorFiles(kwargs["hf_weights_files"] if "hf_weights_files" in kwargs else args[0])
    return wrapped(*args, **kwargs)


def _get_all_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    build = CURRENT_BUILD.get()
    weights = wrapped(*args, **kwargs)
    return weights if build is None else ((name, tensor) for name, tensor in weights if not build.skips(name))


def _load_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    build = CURRENT_BUILD.get()
    if build is None:
        return wrapped(*args, **kwargs)
    model = kwargs["model"] if "model" in kwargs else args[0]
    with build.loading(model):
        return wrapped(*args, **kwargs)


def _reload_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    raise UnsupportedError(
        "reload_weights would change the weights of one role, and the FFN server would go on with the old ones; "
        "start both roles again with the new checkpoint"
    )
