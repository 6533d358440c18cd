"""RoutedBuild: a main model with ``AFD_GATE=attention``, from construction to the proof after load.

The cut goes through the native mixture of experts. The attention role keeps the module with its router, and gives up
the experts; the FFN role keeps the experts, and gives up the router. Dense layers stay whole in the attention role.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from afd_patch.errors import UnsupportedError
from afd_patch.patches.experts import Experts, crossed_routing
from afd_patch.patches.model_build import ModelBuild, parameters_to_meta, take_back_registrations
from afd_patch.patches.runners import NotCuttable, find_runner, require_ending, require_own_rows, take_gate

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary
    from afd_patch.identity import Identity


#: What is used of vLLM's ``MoERunner``.
_RUNNER = (
    "gate",
    "router",
    "routed_experts",
    "_shared_experts",
    "_forward_impl",
    "moe_config",
    "routed_input_transform",
    "routed_output_transform",
)


class RoutedBuild(ModelBuild):
    """``layers`` are those with a mixture of experts: stand-ins, or what computes their experts."""

    gate = "attention"

    def __init__(self, role: str, boundary: Boundary, vllm_config: Any, identity: Identity) -> None:
        super().__init__(role, boundary, vllm_config, identity)
        assert boundary.router is not None, "refused by the boundary table"
        self._router_names = boundary.router.names
        self._own_gate = boundary.own_gate(())
        config = vllm_config.model_config.hf_text_config
        self._hidden = identity.hidden_size
        self._has_shared = boundary.has_shared(vllm_config)
        self._ending = boundary.ending(vllm_config, "attention")
        self._top_k = boundary.router.experts_per_row(config)
        self._blocks: list[nn.Module] = []
        self._moe_depth = 0

    # -- while native constructors run ---------------------------------------------------------------------------

    @contextmanager
    def decoder_layer(self, layer: nn.Module) -> Iterator[None]:
        with super().decoder_layer(layer):
            yield
        if not self.boundary.ffn_summands:
            return
        # Here one class is the dense FFN of some layers and a part of the sparse ones; only now we know which.
        parts = self._summands(layer)
        if self.role == "attention":
            others = [part for part in parts if not self._is_moe(part)]
        else:
            others = [] if parts else [getattr(layer, self.boundary.ffn_attribute)]
        for module in others:
            parameters_to_meta(module)

    def _summands(self, layer: nn.Module) -> list[nn.Module]:
        """The FFN of a layer that has it in several modules; empty for other layers."""
        names = self.boundary.ffn_summands
        return [getattr(layer, name) for name in names] if all(hasattr(layer, name) for name in names) else []

    @contextmanager
    def ffn_module(self, module: nn.Module) -> Iterator[None]:
        """A mixture of experts, a shared expert inside of one, or a dense FFN."""
        if self._is_moe(module):
            self._moe_depth += 1
            try:
                with self._storage_in("both", module):
                    yield
            finally:
                self._moe_depth -= 1
            if self.role == "ffn":
                for part in self._router_modules(module):
                    parameters_to_meta(part)
        elif self._moe_depth:
            with self._storage_in("ffn", module):
                yield
        else:
            with self._storage_in("both" if self.boundary.ffn_summands else "attention", module):
                yield

    @contextmanager
    def routed_experts(self, module: nn.Module) -> Iterator[None]:
        """Construction of a native ``RoutedExperts``."""
        with self._storage_in("ffn", module):
            yield

    @contextmanager
    def _storage_in(self, role: str, module: nn.Module) -> Iterator[None]:
        """Construction of ``module``; its parameters get storage in ``role`` only, or in both roles."""
        if role not in ("both", self.role):
            with torch.device("meta"):
                yield
            # Native code may name a device itself; what it allocated goes away with the constructor.
            parameters_to_meta(module)
            return
        self._ffn_depth += 1
        try:
            yield
        finally:
            self._ffn_depth -= 1

    def _router_modules(self, block: nn.Module) -> list[nn.Module]:
        return [child for name, child in block.named_children() if name in self._router_names]

    # -- when the native model is complete -----------------------------------------------------------------------

    def finish(self, model: nn.Module) -> None:
        super().finish(model)
        if not self.crossing:
            raise UnsupportedError(
                f"every layer of this {type(model).__name__} is dense, so with AFD_GATE=attention nothing would cross; "
                "use AFD_GATE=ffn"
            )

    def _swap_ffn(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        from afd_patch.attention.experts import make_elsewhere, make_ending, make_remote_experts, make_remote_shared
        from afd_patch.attention.proxy import make_nothing

        parents = {id(module): parent for parent in model.modules() for module in parent.children()}
        removed: set[int] = set()
        for number, (block, runner, others) in self._sparse_layers(native).items():
            experts, shared = runner.routed_experts, runner._shared_experts
            stand_in = make_remote_experts(experts, number)
            runner.routed_experts = self.layers[number] = stand_in
            gone = list(experts.modules())
            ending = None
            if shared is not None:
                gone += [part for child in (shared, shared._layer) for part in child.modules()]
                if self._ending:
                    ending = make_ending(shared._layer, self._ending, number)
                runner._shared_experts = make_remote_shared(shared, number, ending)
            for attribute, module in others.items():
                setattr(parents[id(module)], attribute, make_nothing(module, number))
                gone += module.modules()
            removed |= {id(part) for part in gone}
            for name, child in list(block._modules.items()):
                if child is not None and child is not ending and id(child) in removed:
                    setattr(block, name, make_elsewhere(child, number))
            self._blocks.append(block)
        take_back_registrations(self.vllm_config, removed)

    def _keep_ffn_only(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        kept: list[nn.Module] = []
        for number, (_, runner, others) in self._sparse_layers(native).items():
            runner.gate = None
            runner.router = crossed_routing(runner.router, self._top_k, runner.moe_config.num_experts)
            # The router's; no kernel that is given its routing asks for it.
            runner.routed_experts.e_score_correction_bias = None
            gate = take_gate(runner._shared_experts._layer, self._ending) if self._ending else None
            self.layers[number] = Experts(runner, list(others.values()), gate)
            kept += [self.layers[number]]
        self._keep_only(model, kept)

    def _sparse_layers(
        self, native: dict[int, dict[str, nn.Module]]
    ) -> dict[int, tuple[nn.Module, Any, dict[str, nn.Module]]]:
        """The mixture of experts of each layer that has one, its runner, and the other summands of the layer's FFN."""
        found = {}
        for number, parts in native.items():
            blocks = [module for module in parts.values() if self._is_moe(module)]
            if blocks:
                (block,) = blocks
                others = {name: module for name, module in parts.items() if module is not block}
                found[number] = (block, self._runner_of(block, number), others)
        self._own_gate = self.boundary.own_gate(set(native) - set(found))
        self.crossing = len(found)
        return found

    def _runner_of(self, block: nn.Module, number: int) -> Any:
        """The runner inside of ``block``; raises ``UnsupportedError`` where the cut would change what it computes."""
        try:
            return self._cuttable_runner_of(block)
        except NotCuttable as reason:
            raise UnsupportedError(
                f"layer {number}: {reason}, so its router cannot run in the attention role; use AFD_GATE=ffn"
            ) from None

    def _cuttable_runner_of(self, block: nn.Module) -> Any:
        from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

        runner = find_runner(block, _RUNNER)
        require_own_rows(runner, self._hidden)
        shared = runner._shared_experts
        if self._ending and shared is not None:
            require_ending(shared._layer, self._ending)
        own = {id(part) for part in runner.modules()} | {id(part) for part in self._router_modules(block)}
        if shared is not None:
            own |= {id(part) for part in shared._layer.modules()}
        unknown = [name for name, child in block._modules.items() if child is not None and id(child) not in own]
        unknown += [name for name in block._parameters if name not in self._router_names]
        for wrong, reason in (
            (unknown, f"its {', '.join(unknown)} is neither of the router nor of the experts"),
            (runner.routed_experts.quant_method.is_monolithic, "the kernel of its experts does the routing itself"),
            (isinstance(runner.router, ZeroExpertRouter), "its router computes a result of its own"),
            (
                runner.moe_config.experts_per_token != self._top_k or (shared is not None) != self._has_shared,
                f"it has {runner.moe_config.experts_per_token} experts per row and "
                f"{'no ' if shared is None else ''}shared experts, and its configuration says otherwise",
            ),
        ):
            if wrong:
                raise NotCuttable(reason)
        return runner

    # -- weights -------------------------------------------------------------------------------------------------

    def _owner(self, name: str) -> Any:
        return self.boundary.weights.owner(name, self.num_layers, self._own_gate)

    def _foreign(self, model: nn.Module) -> list[str]:
        if self.role == "ffn":
            return super()._foreign(model)
        own = {id(p) for block in self._blocks for part in self._router_modules(block) for p in part.parameters()}
        own |= {id(p) for block in self._blocks for name, p in block._parameters.items() if name in self._router_names}
        cut = {id(p) for block in self._blocks for p in block.parameters()}
        return [name for name, parameter in model.named_parameters() if id(parameter) in cut - own]
