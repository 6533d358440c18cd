"""Which elements of a role's parameters a loader wrote.

vLLM's own check exempts nearly all linear and expert weights, so a checkpoint without one expert's tensor loads
without a word. Counting what reaches each parameter's storage works for every native loader, whatever it does with a
tensor in between (stacking, fusing, sharding, quantised layouts), and costs one Python call per copied tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class WriteCounter(TorchDispatchMode):
    """While active, records in-place writes to the storages of ``parameters``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        # storage address -> distinct views written, each with its number of elements
        self._written: dict[int, dict[tuple[Any, ...], int]] = {
            address: {} for p in parameters if (address := _address(p)) is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            target = args[0]
            views = self._written.get(_address(target) or 0)
            if views is not None:
                key = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
                views[key] = target.numel()
        return result

    def written_share(self, parameter: nn.Parameter) -> float:
        """Between 0 and 1: how much of ``parameter`` was written."""
        address = _address(parameter)
        if address is None:
            return 1.0
        return min(1.0, sum(self._written.get(address, {}).values()) / parameter.numel())


def _address(tensor: torch.Tensor) -> int | None:
    if tensor.is_meta or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def incomplete_parameters(model: nn.Module, writes: WriteCounter) -> list[str]:
    """Names (with the share that was written) of parameters that a checkpoint must fill and did not.

    Left out, as in vLLM's own check (``DefaultModelLoader.track_weights_loading``): scales of the KV cache, which
    have defaults, online quantisation, which makes its parameters itself, and ``input_scale_ub``, which comes from
    the quantisation configuration.
    """
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    incomplete = []
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod) or getattr(method, "uses_meta_device", False):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            share = writes.written_share(parameter)
            if share < 1.0 and name != "input_scale_ub":
                incomplete.append(f"{prefix}.{name} ({share:.0%} written)")
    return incomplete


_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..+)$")


def missing_expert_tensors(names: Iterable[str]) -> list[str]:
    """Tensors that some experts of a layer have in a checkpoint and others do not."""
    experts: dict[str, set[str]] = {}
    suffixes: dict[str, set[str]] = {}
    present = set(names)
    for match in filter(None, map(_EXPERT.match, present)):
        experts.setdefault(match[1], set()).add(match[2])
        suffixes.setdefault(match[1], set()).add(match[3])
    return [
        name
        for prefix in sorted(experts)
        for expert in range(1 + max(map(int, experts[prefix])))
        for suffix in sorted(suffixes[prefix])
        if (name := f"{prefix}{expert}{suffix}") not in present
    ]
