"""SummedBuild: a compiled main model with the router in the FFN role, whose FFN ends in more than a kernel.

A compiler fuses the sum of shared and routed experts with the residual addition and the norm that follow, and how it
does so depends on how many buffers there are to read. So results cross as the kernels wrote them. The attention role
keeps the native mixture of experts with its runner, or the native addition in the decoder layer, which scale and add
them as in the stock graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from afd_patch.errors import UnsupportedError
from afd_patch.patches.model_build import ModelBuild, take_back_registrations
from afd_patch.patches.runners import NotCuttable, find_runner, require_ending, require_own_rows, take_gate

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
    "routed_scaling_factor",
)


class SummedBuild(ModelBuild):
    """``layers`` are all layers; those whose FFN ends in a kernel return its result in the place of the routed one."""

    def __init__(self, role: str, boundary: Boundary, vllm_config: Any, identity: Identity) -> None:
        super().__init__(role, boundary, vllm_config, identity)
        assert boundary.router is not None, "other families have a ModelBuild"
        self._router_names = boundary.router.names
        self._hidden = identity.hidden_size
        self._has_shared = boundary.has_shared(vllm_config)
        self._further_columns = identity.reply_columns - identity.hidden_size
        self._ending = boundary.ending(vllm_config, "ffn")

    def _stand_ins(self, number: int, parts: list[nn.Module]) -> list[nn.Module]:
        from afd_patch.attention.proxy import make_summands

        if len(parts) == 1:
            return super()._stand_ins(number, parts)
        first, second = parts
        return make_summands(first, second, number)

    def _swap_ffn(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        whole = {}
        removed: set[int] = set()
        for number, parts in native.items():
            block = next(iter(parts.values()))
            runner = self._runner_of(block, number) if len(parts) == 1 else None
            if runner is None:
                whole[number] = parts
                continue
            removed |= {id(part) for part in block.modules()} - {id(block)}
            self._swap_experts(block, runner, number)
            self.layers[number] = block
        super()._swap_ffn(model, whole)
        take_back_registrations(self.vllm_config, removed)

    def _swap_experts(self, block: nn.Module, runner: Any, number: int) -> None:
        """Leave ``block`` and its ``runner`` what puts the results together, and nothing that computes them."""
        from afd_patch.attention import experts

        routed, shared = runner.routed_experts, runner._shared_experts
        ending = experts.make_ending(shared._layer, self._ending, number) if self._ending else None
        routers = self._router_names if runner.gate is None else ()
        for parent in (block, runner):
            for name, child in list(parent._modules.items()):
                if child is None or child is runner or child is ending:
                    continue
                # A block that calls its router itself is given something to hand on to the runner, which ignores it.
                hands_on = parent is block and name in routers
                setattr(parent, name, (experts.make_handed_on if hands_on else experts.make_elsewhere)(child, number))
        # What native code asks these two outside of the call that is replaced.
        runner.routed_experts = experts.make_remote_experts(routed, number)
        runner._shared_experts = experts.make_remote_shared(shared, number, ending)
        runner._forward_entry = experts.remote_summands(number, ending)

    def _keep_ffn_only(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        super()._keep_ffn_only(model, native)
        for number, parts in native.items():
            first, *others = parts.values()
            if others:
                self.layers[number] = Apart([first, *others])
            elif (runner := self._runner_of(first, number)) is not None:
                self.layers[number] = self._summands(first, runner)
            elif self._further_columns:
                self.layers[number] = Alone(first, self._further_columns)

    def _summands(self, block: nn.Module, runner: Any) -> nn.Module:
        router = getattr(block, self._router_names[0]) if runner.gate is None else None
        gate = take_gate(runner._shared_experts._layer, self._ending) if self._ending else None
        return Summands(runner, router, gate)

    def _runner_of(self, block: nn.Module, number: int) -> Any:
        """The native runner of a mixture of experts with shared ones; ``None`` for an FFN that ends in a kernel."""
        if not self._is_moe(block):
            return None
        try:
            runner = find_runner(block, _RUNNER)
            if (runner._shared_experts is not None) != self._has_shared:
                has = "no " if self._has_shared else ""
                raise NotCuttable(f"it has {has}shared experts, and its configuration says otherwise")
            if not self._has_shared:
                if runner.routed_scaling_factor != 1.0:
                    raise NotCuttable("its runner scales the result of its experts, and adds no others to it")
                return None
            require_own_rows(runner, self._hidden)
            if self._ending:
                require_ending(runner._shared_experts._layer, self._ending)
        except NotCuttable as reason:
            raise UnsupportedError(
                f"layer {number}: {reason}, so a compiled model cannot be split exactly; add --enforce-eager"
            ) from None
        return runner


class Summands(nn.Module):
    """The routed and the shared result of the native ``runner``, which its ``forward`` would scale and add.

    ``router`` computes logits where the runner has none of its own; ``shared_gate`` is that of the shared experts.
    """

    def __init__(self, runner: Any, router: nn.Module | None, shared_gate: nn.Module | None) -> None:
        super().__init__()
        self.runner = runner
        self.router = router
        self.shared_gate = shared_gate

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = rows if self.router is None else self.router(rows)[0]
        shared, routed = self.runner._forward_impl(rows, logits, rows, None)
        return (routed, shared) if self.shared_gate is None else (routed, shared, self.shared_gate(rows)[0])


class Apart(nn.Module):
    """The results of the modules of a layer that adds them up itself."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.summands = nn.ModuleList(modules)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(module(rows) for module in self.summands)


class Alone(nn.Module):
    """An FFN whose result is no sum, in the place of the routed one, and ``further`` columns that nobody reads."""

    def __init__(self, module: nn.Module, further: int) -> None:
        super().__init__()
        self.module = module
        self.further = further

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.module(rows)
        return result, result.new_zeros((result.shape[0], self.further))
