"""LoRA: adapters belong to the attention role, whose projections they change.

The FFN role knows nothing of adapters (``engine_config.py`` turns them off there), so an adapter that changes an FFN
cannot be served; it is refused when it is loaded, with the names. vLLM's manager does not touch a stand-in: it is a
``PPMissingLayer`` without modules in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_patch.errors import UnsupportedError
from afd_patch.patch_manager import Patch, host

if TYPE_CHECKING:
    from torch import nn

    from afd_patch.config import AFDConfig

#: The file of an adapter that PEFT writes.
_ADAPTER = "adapter_model.safetensors"


def patches(config: AFDConfig) -> list[Patch]:
    if config.role == "ffn":
        return []
    return [
        Patch(
            name="lora.load_adapter",
            target="vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
            make=host(_load_adapter),
            params=("lora_request",),
            why="an adapter that changes an FFN is refused with a sentence, before its weights are read",
            upstream="vllm/lora/worker_manager.py WorkerLoRAManager._load_adapter, the only reader of adapters",
            removal="FFN servers that apply adapters to the rows of the requests that ask for them",
        )
    ]


def _load_adapter(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from vllm.lora.utils import get_adapter_absolute_path

    request = kwargs["lora_request"] if "lora_request" in kwargs else args[0]
    file = Path(get_adapter_absolute_path(request.lora_path)) / _ADAPTER
    if file.is_file():  # in another format, vLLM's own check refuses the names, with a sentence of its own
        foreign = ffn_modules(_tensor_names(file), instance._adapter_manager.model)
        if foreign:
            raise UnsupportedError(
                f"LoRA adapter {request.lora_name!r} changes modules of the FFN role ({', '.join(foreign[:4])}"
                + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else "")
                + "), where no adapter is applied; use one that changes attention projections only"
            )
    return wrapped(*args, **kwargs)


def ffn_modules(tensors: list[str], model: nn.Module) -> list[str]:
    """The modules among those of an adapter's ``tensors`` that are inside of stand-ins of ``model``."""
    from afd_patch.attention.proxy import NothingToAdd, RemoteFFN

    stand_ins = [name for name, module in model.named_modules() if isinstance(module, RemoteFFN | NothingToAdd)]
    inside = [name for name in tensors if any(f".{stand_in}." in f".{name}" for stand_in in stand_ins)]
    return sorted({name.partition(".lora_")[0] for name in inside})


def _tensor_names(file: Path) -> list[str]:
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    return [name for name in header if name != "__metadata__"]
