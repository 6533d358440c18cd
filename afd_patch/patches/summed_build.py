"""SummedBuild: a compiled main model whose FFN ends in a sum, with the router in the FFN role.

A compiler fuses the sum of shared and routed experts with the residual addition and the norm that follow, and how it
does so depends on how many buffers there are to read. So the two results cross apart, and the attention role keeps the
native mixture of experts and its runner, which scales and adds them as in the stock graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from afd_patch.errors import UnsupportedError
from afd_patch.patches.model_build import ModelBuild, take_back_registrations

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.identity import Identity


#: What is used of ``MoERunner``.
_RUNNER = (
    "_forward_entry",
    "_forward_impl",
    "_shared_experts",
    "gate",
    "moe_config",
    "routed_experts",
    "routed_input_transform",
    "routed_output_transform",
)


class SummedBuild(ModelBuild):
    """``layers`` are all layers; those without shared experts return their result in the place of the routed one."""

    def __init__(self, role: str, boundary: Boundary, vllm_config: Any, identity: Identity) -> None:
        super().__init__(role, boundary, vllm_config, identity)
        self._hidden = identity.hidden_size

    def _swap_ffn(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        from afd_patch.attention.experts import make_elsewhere, make_remote_experts, make_remote_shared, remote_summands

        whole = {}
        removed: set[int] = set()
        for number, parts in native.items():
            ((attribute, block),) = parts.items()
            runner = self._runner_of(block, number)
            if runner is None:
                whole[number] = {attribute: block}
                continue
            removed |= {id(part) for part in block.modules()} - {id(block)}
            experts, shared = runner.routed_experts, runner._shared_experts
            for parent in (block, runner):
                for name, child in list(parent._modules.items()):
                    if child is not None and child is not runner:
                        setattr(parent, name, make_elsewhere(child, number))
            # What native code asks these two outside of the call that is replaced.
            runner.routed_experts = make_remote_experts(experts, number)
            runner._shared_experts = make_remote_shared(shared, number)
            runner._forward_entry = remote_summands(number)
            self.layers[number] = block
        super()._swap_ffn(model, whole)
        take_back_registrations(self.vllm_config, removed)

    def _keep_ffn_only(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        super()._keep_ffn_only(model, native)
        for number, block in list(self.layers.items()):
            runner = self._runner_of(block, number)
            self.layers[number] = Alone(block) if runner is None else Summands(runner)

    def _runner_of(self, block: nn.Module, number: int) -> Any:
        """The native runner of a mixture of experts with shared experts; ``None`` for other FFNs."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        if not self._is_moe(block):
            return None
        runners = [child for child in block.children() if isinstance(child, MoERunner)]
        if len(runners) != 1:
            raise self._refusal(number, f"{type(block).__name__} has {len(runners)} runners of experts, not one")
        (runner,) = runners
        lacking = [name for name in _RUNNER if not hasattr(runner, name)]
        if lacking:
            raise self._refusal(number, f"this vLLM's MoERunner has no {', '.join(lacking)}")
        if runner._shared_experts is None:
            return None
        for wrong, reason in (
            (runner.gate is None, "its runner of experts has no router"),
            (
                runner.routed_input_transform is not None or runner.routed_output_transform is not None,
                "its rows are transformed around the experts",
            ),
            (runner.moe_config.hidden_dim != self._hidden, "the kernel of its experts pads the rows"),
        ):
            if wrong:
                raise self._refusal(number, reason)
        return runner

    def _refusal(self, number: int, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"layer {number}: {reason}, so a compiled model cannot be split exactly; add --enforce-eager"
        )


class Summands(nn.Module):
    """The routed and the shared result of the native ``runner``, which its ``forward`` would scale and add."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared, routed = self.runner._forward_impl(rows, rows, rows, None)
        return routed, shared


class Alone(nn.Module):
    """An FFN whose result is no sum, in the place of the routed one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.module(rows)
        return result, torch.zeros_like(result)
