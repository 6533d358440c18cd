"""RemoteFFN: the parameter-free stand-in for a decoder layer's FFN.

A stand-in is a real ``nn.Module`` of a class made for the native one, ``(RemoteFFN, NativeFFN, PPMissingLayer)``:
native code tests ``isinstance(layer.mlp, NativeFFN)`` in over forty places, one of them in every forward
(``DeepseekV2DecoderLayer.forward``, fp16), and native weight loaders skip a ``PPMissingLayer``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from afd_patch.attention.op import REMOTE_FFN, REMOTE_FFN_IDS, REMOTE_SUMMANDS
from afd_patch.errors import ConnectorError

#: What a native FFN keeps as plain attributes and others read (``n_routed_experts``, ``tp_size``, ...).
_PLAIN = (bool, int, float, str, type(None))


class RemoteFFN:
    """The behaviour of a stand-in; mixed in front of the native class."""

    afd_layer: int

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[tokens, hidden]`` in, the same shape and dtype out; the input is not written to."""
        out = torch.empty_like(hidden_states)
        REMOTE_FFN(hidden_states, out, self.afd_layer)
        return out

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


class RemoteIdsFFN(RemoteFFN):
    """The stand-in for an FFN that takes the token id of each row beside the rows."""

    def forward(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """``input_ids`` is int32 ``[tokens]``; anything else raises ``ConnectorError`` before something is sent."""
        tokens = hidden_states.shape[0]
        if input_ids is None or input_ids.shape != (tokens,) or input_ids.dtype != torch.int32:
            given = "not given" if input_ids is None else f"{input_ids.dtype} {tuple(input_ids.shape)}"
            raise ConnectorError(
                f"layer {self.afd_layer}: input_ids is {given}, and its FFN takes torch.int32 {(tokens,)}, one token "
                "id for each row; the model runner has to pass them on"
            )
        out = torch.empty_like(hidden_states)
        REMOTE_FFN_IDS(hidden_states, input_ids, out, self.afd_layer)
        return out


class RemoteSummand(RemoteFFN):
    """The stand-in for the first of two modules whose results the layer adds up; it brings the other one along."""

    afd_other: list[torch.Tensor | None]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[tokens, hidden]`` in, the same shape and dtype out."""
        result, other = torch.empty_like(hidden_states), torch.empty_like(hidden_states)
        REMOTE_SUMMANDS(hidden_states, result, other, None, self.afd_layer)
        self.afd_other[0] = other
        return result


class BroughtSummand(RemoteFFN):
    """The stand-in for the second one."""

    afd_other: list[torch.Tensor | None]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the first one brought along, once."""
        result, self.afd_other[0] = self.afd_other[0], None
        assert result is not None, "the layer calls its summands in the order of the boundary table"
        return result


class NothingToAdd:
    """A stand-in for what the FFN role has already added to the result of the layer's ``RemoteFFN``."""

    afd_layer: int

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Minus zero, without dimensions: added to anything, it changes no bit, not even the sign of a zero."""
        return hidden_states.new_full((), -0.0)

    def extra_repr(self) -> str:
        return f"layer={self.afd_layer}"


@cache
def stand_in_class(native: type, behaviour: type) -> Any:
    """The stand-in class for the native FFN class ``native`` with the forward of ``behaviour``."""
    from vllm.model_executor.models.utils import PPMissingLayer

    prefix = behaviour.__name__.removesuffix("FFN")
    return type(f"{prefix}{native.__name__}", (behaviour, native, PPMissingLayer), {"__module__": __name__})


def make_remote(native: nn.Module, layer: int, input_ids: bool = False) -> nn.Module:
    """A stand-in for ``native``, the FFN of decoder layer number ``layer``, with its plain public attributes.

    ``input_ids``: the FFN takes the token ids of the rows, too.
    """
    return make_stand_in(native, RemoteIdsFFN if input_ids else RemoteFFN, layer)


def make_nothing(native: nn.Module, layer: int) -> nn.Module:
    """A stand-in for ``native``, a further part of that FFN, whose share the layer's ``RemoteFFN`` returns."""
    return make_stand_in(native, NothingToAdd, layer)


def make_summands(first: nn.Module, second: nn.Module, layer: int) -> list[nn.Module]:
    """Stand-ins for two modules of decoder layer ``layer``, whose results it adds up in this order."""
    pair = [make_stand_in(first, RemoteSummand, layer), make_stand_in(second, BroughtSummand, layer)]
    pair[0].afd_other = pair[1].afd_other = [None]
    return pair


def make_stand_in(native: nn.Module, behaviour: type, layer: int) -> Any:
    """A module without parameters, with the plain attributes of ``native`` and the behaviour of ``behaviour``."""
    cls = stand_in_class(native.__class__, behaviour)
    stand_in = cls.__new__(cls)
    nn.Module.__init__(stand_in)
    for name, value in vars(native).items():
        if not name.startswith("_") and isinstance(value, _PLAIN):
            setattr(stand_in, name, value)
    stand_in.afd_layer = layer
    stand_in.train(native.training)
    return stand_in
