"""ModelBuild: one main model of a role, from construction to the proof after load.

It records what the intercepted constructors meet, and swaps modules when the native model is complete. It changes
model objects only, never vLLM itself; that is what the patches beside it do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from afd_patch.errors import UnsupportedError, WeightError
from afd_patch.patches.coverage import WriteCounter, incomplete_parameters, missing_expert_tensors

if TYPE_CHECKING:
    from afd_patch.boundaries import Boundary, OwnedBy
    from afd_patch.identity import Identity
    from afd_patch.patches.readahead import TensorFiles

_LAYER_NAME = re.compile(r"(?:^|\.)layers\.(\d+)$")


class ModelBuild:
    """The main model of ``role`` under construction; ``layers`` maps layer numbers to FFN (or stand-in) modules.

    ``files`` are those that are being read, where the loader says so.
    """

    #: Where the router runs.
    gate = "ffn"

    def __init__(self, role: str, boundary: Boundary, vllm_config: Any, identity: Identity) -> None:
        refusals = list(boundary.refusals(vllm_config, self.gate))
        if refusals:
            raise UnsupportedError(
                f"{vllm_config.model_config.hf_config.architectures[0]} cannot run in the {role} role like this: "
                + "; ".join(refusals)
            )
        self.role = role
        self.boundary = boundary
        self.vllm_config = vllm_config
        self.request_columns = identity.request_columns
        self.num_layers: int = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.constructing = False
        #: How many layers hand over rows.
        self.crossing = self.num_layers
        self.layers: dict[int, nn.Module] = {}
        self.files: TensorFiles | None = None
        self._owners: dict[str, OwnedBy] = {}
        self._decoder_layers: list[nn.Module] = []
        self._layer_depth = 0
        self._ffn_depth = 0

    # -- while native constructors run ---------------------------------------------------------------------------

    @property
    def inside_layer(self) -> bool:
        return self._layer_depth > 0

    @contextmanager
    def construction(self) -> Iterator[None]:
        """Native model construction; in the FFN role parameters outside of FFN modules get no storage."""
        with ExitStack() as stack:
            if self.role == "ffn":
                hook = register_module_parameter_registration_hook(self._without_storage)
                stack.callback(hook.remove)
            self.constructing = True
            try:
                yield
            finally:
                self.constructing = False

    @contextmanager
    def decoder_layer(self, layer: nn.Module) -> Iterator[None]:
        self._layer_depth += 1
        try:
            yield
        finally:
            self._layer_depth -= 1
        self._decoder_layers.append(layer)

    @contextmanager
    def ffn_module(self, module: nn.Module) -> Iterator[None]:
        """Construction of an FFN module (or of a part of one that has the same class, such as a shared expert)."""
        self._ffn_depth += 1
        try:
            if self.role == "attention":
                with torch.device("meta"):
                    yield
                # Native code may name a device itself; what it allocated goes away with the constructor.
                parameters_to_meta(module)
            else:
                yield
        finally:
            self._ffn_depth -= 1

    def leave_out_attention(self, module: nn.Module) -> None:
        """Instead of the native constructor: a module with nothing in it."""
        nn.Module.__init__(module)

    def _without_storage(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if self._ffn_depth or parameter is None or parameter.is_meta:
            return None
        return _on_meta(parameter)

    # -- when the native model is complete -----------------------------------------------------------------------

    def finish(self, model: nn.Module) -> None:
        """Put the stand-ins in place and take back what the removed modules registered."""
        found = {
            id(module): int(match[1]) for name, module in model.named_modules() if (match := _LAYER_NAME.search(name))
        }
        native = {
            found[id(layer)]: self._ffn_of(layer, found[id(layer)])
            for layer in self._decoder_layers
            if id(layer) in found
        }
        missing = sorted(set(range(self.num_layers)) - set(native))
        if missing:
            raise UnsupportedError(
                f"{type(model).__name__} built {len(native)} of {self.num_layers} decoder layers through "
                f"{self.boundary.decoder} (missing: {missing}); this vLLM builds them "
                "differently, so it cannot be split"
            )
        if self.role == "attention":
            self._swap_ffn(model, native)
        else:
            self._keep_ffn_only(model, native)
        self._decoder_layers.clear()

    def _ffn_of(self, layer: nn.Module, number: int) -> dict[str, nn.Module]:
        """The FFN of ``layer``, by attribute: one module, or those whose results the layer adds up, in that order."""
        summands = self.boundary.ffn_summands
        in_parts = bool(summands) and all(hasattr(layer, attribute) for attribute in summands)
        known = [name.partition(":")[2] for name in self.boundary.ffn]
        parts = {}
        for attribute in summands if in_parts else (self.boundary.ffn_attribute,):
            module = getattr(layer, attribute, None)
            if not isinstance(module, nn.Module) or type(module).__name__ not in known:
                raise UnsupportedError(
                    f"layer {number}: {type(layer).__name__}.{attribute} is a {type(module).__name__}, and the "
                    f"boundary table of {self.boundary.family} knows {', '.join(known)}; this vLLM "
                    "builds the layer differently, so it cannot be split"
                )
            self._require_complete_result(module, number)
            parts[attribute] = module
        return parts

    def _is_moe(self, module: nn.Module) -> bool:
        return type(module).__name__ in [name.partition(":")[2] for name in self.boundary.moe]

    def _require_complete_result(self, module: nn.Module, number: int) -> None:
        """Refuse an FFN whose sum over the tensor-parallel ranks is left to what follows it (the next norm).

        A remote result is complete, so what follows would add it up once more for each rank.
        """
        if self.vllm_config.parallel_config.tensor_parallel_size == 1:
            return
        left_open = any(getattr(child, "reduce_results", True) is False for child in module.children())
        for part in module.modules():
            config = getattr(part, "moe_config", None)
            left_open |= getattr(config, "skip_final_all_reduce", False) or getattr(part, "is_sequence_parallel", False)
        if left_open:
            raise UnsupportedError(
                f"layer {number}: {type(module).__name__} leaves the sum over the tensor-parallel ranks to what "
                "follows it, so its result is not complete; use --tensor-parallel-size 1"
            )

    def _swap_ffn(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        parents = {id(module): parent for parent in model.modules() for module in parent.children()}
        removed = {id(part) for module in _modules(native) for part in module.modules()}
        stand_ins: dict[int, nn.Module] = {}
        for number, parts in native.items():
            made = self._stand_ins(number, list(parts.values()))
            self.layers[number] = made[0]
            for (attribute, module), stand_in in zip(parts.items(), made, strict=True):
                stand_ins[id(module)] = stand_in
                setattr(parents[id(module)], attribute, stand_in)
        replace_in_lists(model, stand_ins, removed)
        take_back_registrations(self.vllm_config, removed)

    def _stand_ins(self, number: int, parts: list[nn.Module]) -> list[nn.Module]:
        """Stand-ins for the modules of the FFN of layer ``number``; the FFN role adds their results up."""
        from afd_patch.attention.proxy import make_nothing, make_remote

        first, *others = parts
        remote = make_remote(first, number, self.boundary.input_ids)
        return [remote, *(make_nothing(module, number) for module in others)]

    def _keep_ffn_only(self, model: nn.Module, native: dict[int, dict[str, nn.Module]]) -> None:
        for number, parts in native.items():
            summands = list(parts.values())
            self.layers[number] = summands[0] if len(summands) == 1 else Sum(summands)
        self._keep_only(model, _modules(native))

    def _keep_only(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Leave ``modules`` in ``model``, and what leads to them; nothing else keeps a parameter."""
        from vllm.model_executor.models.utils import PPMissingLayer

        kept = {id(part) for module in modules for part in module.modules()}
        on_path = {id(module) for module in model.modules() if any(id(part) in kept for part in module.modules())}
        removed: set[int] = set()
        for module in list(model.modules()):
            if id(module) in kept or id(module) not in on_path:
                continue
            for name in module._parameters:
                module._parameters[name] = None
            for name in module._buffers:
                module._buffers[name] = None
            for name, child in list(module._modules.items()):
                if child is not None and id(child) not in on_path:
                    removed |= {id(part) for part in child.modules()}
                    setattr(module, name, PPMissingLayer())
        take_back_registrations(self.vllm_config, removed - kept)

    # -- while weights are loaded --------------------------------------------------------------------------------

    def skips(self, name: str) -> bool:
        """Whether the checkpoint tensor ``name`` is left to the other role; counts each name once."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = self._owner(name)
        return owner != self.role

    def _owner(self, name: str) -> OwnedBy:
        return self.boundary.weights.owner(name, self.num_layers)

    @contextmanager
    def loading(self, model: nn.Module) -> Iterator[None]:
        """The native loader runs; afterwards every parameter of this role must be complete."""
        with WriteCounter(model.parameters()) as writes:
            yield
        incomplete = incomplete_parameters(model, writes)
        if incomplete:
            lacking = missing_expert_tensors(self._owners)
            raise WeightError(
                f"the checkpoint does not fill {', '.join(incomplete[:4])}"
                + (f" and {len(incomplete) - 4} more" if len(incomplete) > 4 else "")
                + (f"; it lacks {', '.join(lacking[:4])}" if lacking else "")
                + "; the checkpoint is incomplete: fetch it again"
            )

    @property
    def tensors_loaded(self) -> int:
        return sum(owner == self.role for owner in self._owners.values())

    @property
    def tensors_left(self) -> int:
        return len(self._owners) - self.tensors_loaded

    # -- after load ----------------------------------------------------------------------------------------------

    def check_ownership(self, model: nn.Module) -> None:
        """Raise ``WeightError`` if the model holds a parameter that is not this role's, or one without storage."""
        foreign = self._foreign(model)
        if foreign:
            raise WeightError(f"the {self.role} role holds parameters that are not its own: {', '.join(foreign[:8])}")
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty:
            raise WeightError(f"the {self.role} role holds parameters without storage: {', '.join(empty[:8])}")

    def _foreign(self, model: nn.Module) -> list[str]:
        """Names of the parameters of ``model`` that belong to the other role."""
        own = {id(p) for module in self.layers.values() for p in module.parameters()}
        return [name for name, parameter in model.named_parameters() if (id(parameter) in own) != (self.role == "ffn")]

    def forget_missing_layers(self, model: nn.Module) -> None:
        """Drop vLLM's list of the layers that this model leaves out.

        vLLM keeps it by ``id`` of the module and never forgets, so a later model at the same address would leave out
        the same layers (``get_pp_missing_layer_names`` in vllm/model_executor/models/utils.py).
        """
        from vllm.model_executor.models import utils

        for module in model.modules():
            utils._model_to_pp_missing_layer_names.pop(id(module), None)


class Sum(nn.Module):
    """An FFN in several modules: their results for the same rows, added up in the order that the layer adds them."""

    def __init__(self, summands: list[nn.Module]) -> None:
        super().__init__()
        self.summands = nn.ModuleList(summands)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first, *others = self.summands
        result: torch.Tensor = first(rows)
        for module in others:
            result = result + module(rows)
        return result


def _modules(native: dict[int, dict[str, nn.Module]]) -> list[nn.Module]:
    return [module for parts in native.values() for module in parts.values()]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def parameters_to_meta(module: nn.Module) -> None:
    """Parameters only: buffers may be shared with other modules."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[name] = _on_meta(parameter)


def replace_in_lists(model: nn.Module, stand_ins: dict[int, nn.Module], removed: set[int]) -> None:
    """Models keep plain lists of their FFN modules (``moe_mlp_layers``) and of parts of them (``moe_layers``)."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, list) and any(id(item) in removed for item in value):
                value[:] = [
                    stand_ins.get(id(item), item) for item in value if id(item) in stand_ins or id(item) not in removed
                ]


def take_back_registrations(vllm_config: Any, removed: set[int]) -> None:
    """Attention and MoE layers register themselves by name when constructed; by identity they are found again."""
    compilation = vllm_config.compilation_config
    registered = compilation.static_forward_context
    gone = [name for name, module in registered.items() if id(module) in removed]
    for name in gone:
        del registered[name]
    compilation.static_all_moe_layers[:] = [n for n in compilation.static_all_moe_layers if n not in gone]
