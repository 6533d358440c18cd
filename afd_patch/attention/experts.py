"""Stand-ins for the experts of a mixture of experts whose native runner stays in the attention role.

The native MoE module and its runner stay as they are. What holds experts gives way: the runner's ``routed_experts`` and
its ``_shared_experts``, whose results come back with one call. With the router here, ``forward_modular`` of the first
makes that call; with the router in the FFN role, the runner's ``_forward_entry`` does. Scaling and adding the two is
the native runner's business, so its order and precision are native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from afd_patch.attention.op import REMOTE_EXPERTS, REMOTE_SUMMANDS
from afd_patch.attention.proxy import make_stand_in

#: What native code reads of ``RoutedExperts`` besides plain values.
_KEPT = ("moe_config", "activation", "expert_map_manager")


class RemoteQuantMethod:
    """What the native runner asks the quantisation method of its experts.

    It is none of vLLM's own, so that nothing prepares weights that are not here. The answers are the native ones, but
    for ``topk_indices_dtype``: numbers of experts cross as int32, and the FFN role converts them for its kernel.
    """

    moe_kernel = None
    is_monolithic = False
    topk_indices_dtype = torch.int32

    def __init__(self, native: Any) -> None:
        self.has_unpadded_output: bool = native.has_unpadded_output
        self.skip_forward_padding: bool = native.skip_forward_padding
        self.mk_can_overlap_shared_experts: bool = native.mk_can_overlap_shared_experts
        self.supports_internal_mk: bool = native.supports_internal_mk
        self.supports_eplb: bool = native.supports_eplb
        self.method_name: str = native.method_name


class RemoteExperts:
    """The behaviour of the stand-in for ``RoutedExperts``; mixed in front of the native class."""

    afd_layer: int

    def _ensure_moe_quant_config_init(self) -> None:
        """There are no weights whose format could matter."""

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the routed experts make of ``x`` ``[tokens, hidden]``, in its dtype.

        Hands the result of the shared experts to ``shared_experts``, where there are any.
        """
        routed = torch.empty_like(x)
        if shared_experts is None:
            REMOTE_EXPERTS(x, topk_weights, topk_ids, routed, None, None, self.afd_layer)
        else:
            shared, gate = _empty_shared(x, shared_experts.afd_ending)
            REMOTE_EXPERTS(x, topk_weights, topk_ids, routed, shared, gate, self.afd_layer)
            shared_experts.afd_keep(_ended(shared, gate, shared_experts.afd_ending))
        return routed

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


def remote_summands(layer: int, ending: nn.Module | None) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What a native runner calls instead of its own ``_forward_impl`` when router and experts are remote.

    The shared experts end in ``ending`` here, or in the FFN role.
    """

    def forward_entry(hidden_states: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        routed = torch.empty_like(hidden_states)
        shared, gate = _empty_shared(hidden_states, ending)
        REMOTE_SUMMANDS(hidden_states, routed, shared, gate, layer)
        return _ended(shared, gate, ending), routed

    return forward_entry


def _empty_shared(rows: torch.Tensor, ending: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the result of the shared experts goes, and that of their gate."""
    return torch.empty_like(rows), None if ending is None else rows.new_empty((rows.shape[0], 1))


def _ended(shared: torch.Tensor, gate: torch.Tensor | None, ending: nn.Module | None) -> torch.Tensor:
    result: torch.Tensor = shared if ending is None else ending((shared, gate))
    return result


class RemoteSharedExperts:
    """The stand-in for the runner's ``SharedExperts``: what the call of the routed experts brought along.

    ``output`` is the native property, over the native list. ``afd_ending`` is what they end in here, if anything.
    """

    afd_layer: int
    afd_ending: nn.Module | None
    _output: list[torch.Tensor | None]
    _output_idx: int

    def maybe_forward_async(self, shared_experts_input: torch.Tensor) -> bool:
        return False

    def forward(self, shared_experts_input: torch.Tensor, order: Any) -> None:
        return None

    def afd_keep(self, shared: torch.Tensor) -> None:
        self._output[self._output_idx] = shared

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


class Elsewhere:
    """A stand-in for a module that only the FFN role runs, as a part of something that has a stand-in of its own."""

    afd_layer: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"layer {self.afd_layer}: {type(self).__name__} runs in the FFN role")

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


class HandedOn:
    """A stand-in for a module that has nothing to compute, because its result is already in its input.

    ``Qwen2MoeMLP.forward``, for example, is called with ``(down, gate)``. Its first projection and its activation hand
    that on; ``down_proj`` returns what is at ``afd_place`` 0 in it, and ``expert_gate`` what is at 1. Native linear
    layers return a pair (``afd_paired``).
    """

    afd_layer: int
    afd_place: int | None
    afd_paired: bool

    def forward(self, given: Any) -> Any:
        result = given if self.afd_place is None else given[self.afd_place]
        return (result, None) if self.afd_paired else result

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


def make_remote_experts(native: nn.Module, layer: int) -> nn.Module:
    """A stand-in for the ``RoutedExperts`` of decoder layer ``layer``."""
    stand_in = make_stand_in(native, RemoteExperts, layer)
    stand_in.quant_method = RemoteQuantMethod(native.quant_method)
    for name in _KEPT:
        if hasattr(native, name):
            setattr(stand_in, name, getattr(native, name))
    return stand_in


def make_remote_shared(native: nn.Module, layer: int, ending: nn.Module | None = None) -> nn.Module:
    """A stand-in for the ``SharedExperts`` of decoder layer ``layer``, which end in ``ending`` here."""
    stand_in = make_stand_in(native, RemoteSharedExperts, layer)
    stand_in._output = [None, None]
    stand_in.afd_ending = ending
    return stand_in


def make_ending(native: nn.Module, names: tuple[str, str], layer: int) -> nn.Module:
    """``native``, shared experts, without parameters: its ``forward`` is given what the modules ``names`` return.

    So the native code that puts the two together stays in this role.
    """
    for name, child in list(native.named_children()):
        setattr(native, name, make_handed_on(child, layer, names.index(name) if name in names else None))
    return native


def make_handed_on(native: nn.Module, layer: int, place: int | None = None) -> nn.Module:
    """A stand-in for ``native`` that returns its input, or what is at ``place`` in it."""
    from vllm.model_executor.layers.linear import LinearBase

    stand_in = make_stand_in(native, HandedOn, layer)
    stand_in.afd_place = place
    stand_in.afd_paired = isinstance(native, LinearBase)
    return stand_in


def make_elsewhere(native: nn.Module, layer: int) -> nn.Module:
    """A stand-in for ``native``, which nothing calls in the attention role."""
    return make_stand_in(native, Elsewhere, layer)
