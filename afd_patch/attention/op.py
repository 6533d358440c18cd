"""The custom ops of the attention role: rows out, rows in, opaque to every compiler.

``afd_patch::remote_ffn`` hands over rows, and ``remote_ffn_ids`` rows with their token ids; ``remote_summands`` hands
over rows, too, and gets back what native code here adds up; ``remote_experts`` hands over rows and the experts that
the native router chose for them. The ops write to output arguments, because piecewise graphs need outputs at addresses
they know. Everything they need is read inside their bodies, from the forward context: vLLM drops Dynamo's guards, so
what traced Python reads is frozen at the first compile.
"""

from __future__ import annotations

from typing import Any

import torch

from afd_patch.errors import ForwardContextError
from afd_patch.metadata import get_afd_metadata_from_forward_context

OP_NAME = "afd_patch::remote_ffn"
IDS_OP_NAME = "afd_patch::remote_ffn_ids"
SUMMANDS_OP_NAME = "afd_patch::remote_summands"
EXPERTS_OP_NAME = "afd_patch::remote_experts"


_library = torch.library.Library("afd_patch", "FRAGMENT")
_library.define("remote_ffn(Tensor rows, Tensor(a!) out, int layer) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.define(
    "remote_ffn_ids(Tensor rows, Tensor input_ids, Tensor(a!) out, int layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "remote_summands(Tensor rows, Tensor(a!) first, Tensor(b!) second, Tensor(c!)? gate, int layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "remote_experts("
    "Tensor rows, Tensor topk_weights, Tensor topk_ids, "
    "Tensor(a!) routed, Tensor(b!)? shared, Tensor(c!)? shared_gate, int layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def remote_ffn(rows: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Write the FFN of decoder layer ``layer``, applied to ``rows`` ``[tokens, hidden]``, to ``out`` (same shape)."""
    _call(layer, rows, (), out)


def remote_ffn_ids(rows: torch.Tensor, input_ids: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """The same for an FFN that takes ``input_ids``, int32 ``[tokens]``, beside the rows."""
    _call(layer, rows, (input_ids.unsqueeze(1),), out)


def remote_summands(
    rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gate: torch.Tensor | None, layer: int
) -> None:
    """Write two results for ``rows``, which native code here adds up, to ``first`` and ``second``.

    They are those of the routed and of the shared experts of ``layer``, or of its two FFN modules. All are
    ``[tokens, hidden]``; ``gate`` is ``[tokens, 1]``, what the gate of the shared experts makes of the rows, or
    ``None``. Several outputs, because a compiler generates other code for parts of one.
    """
    _call(layer, rows, (), first, second, gate)


def remote_experts(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    layer: int,
) -> None:
    """Write what the experts that were chosen here make of ``rows`` to ``routed``, and the result of shared ones.

    ``shared`` is ``None`` where there are none, ``shared_gate`` where they have no gate, or end in the FFN role.

    ``topk_weights`` (float32) and ``topk_ids`` (int32) are ``[tokens, experts per row]``.
    """
    _call(layer, rows, (topk_weights, topk_ids), routed, shared, shared_gate)


def _call(layer: int, rows: torch.Tensor, side: tuple[torch.Tensor, ...], *outputs: torch.Tensor | None) -> None:
    """One call, whose reply is divided among the ``outputs`` that there are, from its first column on."""
    parts = [output for output in outputs if output is not None]
    metadata = get_afd_metadata_from_forward_context()
    connector = metadata.connector
    if connector is None:
        raise ForwardContextError(f"layer {layer}: this process has no connection to an FFN server")
    first = parts[0]
    direct = first.shape[1] == connector.reply_columns
    reply = first if direct else first.new_empty((first.shape[0], connector.reply_columns))
    connector.call(layer, rows, reply, side=side, stage=metadata.stage, transaction=metadata.transaction)
    if not direct:
        for part, columns in zip(parts, reply.split(first.shape[1], dim=1), strict=False):
            part.copy_(columns)


def _fake(*_: Any) -> None:
    """What a compiler runs instead of any of these ops: they return nothing."""


for _name, _op in (
    (OP_NAME, remote_ffn),
    (IDS_OP_NAME, remote_ffn_ids),
    (SUMMANDS_OP_NAME, remote_summands),
    (EXPERTS_OP_NAME, remote_experts),
):
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(_name, _fake, lib=_library)

#: What stand-ins call.
REMOTE_FFN: Any = torch.ops.afd_patch.remote_ffn
REMOTE_FFN_IDS: Any = torch.ops.afd_patch.remote_ffn_ids
REMOTE_SUMMANDS: Any = torch.ops.afd_patch.remote_summands
REMOTE_EXPERTS: Any = torch.ops.afd_patch.remote_experts
