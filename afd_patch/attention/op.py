"""The custom ops of the attention role: rows out, rows in, opaque to every compiler.

``afd_patch::remote_ffn`` hands over rows; ``afd_patch::remote_experts`` hands over rows and the experts that the native
router chose for them. The ops write to an output argument, because piecewise graphs need outputs at addresses they
know. Everything they need is read inside their bodies, from the forward context: vLLM drops Dynamo's guards, so what
traced Python reads is frozen at the first compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from afd_patch.errors import ForwardContextError
from afd_patch.metadata import AFDForwardContextMetadata, get_afd_metadata_from_forward_context

if TYPE_CHECKING:
    from afd_patch.connectors.contract import FFNConnector

OP_NAME = "afd_patch::remote_ffn"
EXPERTS_OP_NAME = "afd_patch::remote_experts"


_library = torch.library.Library("afd_patch", "FRAGMENT")
_library.define("remote_ffn(Tensor rows, Tensor(a!) out, int layer) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.define(
    "remote_experts(Tensor rows, Tensor topk_weights, Tensor topk_ids, Tensor(a!) out, int layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def remote_ffn(rows: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Write the FFN of decoder layer ``layer``, applied to ``rows`` ``[tokens, hidden]``, to ``out`` (same shape)."""
    metadata, connector = _connected(layer)
    connector.call(layer, rows, out, stage=metadata.stage, transaction=metadata.transaction)


def remote_experts(
    rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    """Write what the experts of decoder layer ``layer`` make of ``rows`` ``[tokens, hidden]`` to ``out``.

    ``topk_weights`` (float32) and ``topk_ids`` (int32) are ``[tokens, experts per row]``. ``out`` is
    ``[tokens, hidden]``, or ``[tokens, 2 * hidden]`` with the result of the shared experts behind that of the routed.
    """
    metadata, connector = _connected(layer)
    side = (topk_weights, topk_ids)
    connector.call(layer, rows, out, side=side, stage=metadata.stage, transaction=metadata.transaction)


def _connected(layer: int) -> tuple[AFDForwardContextMetadata, FFNConnector]:
    metadata = get_afd_metadata_from_forward_context()
    if metadata.connector is None:
        raise ForwardContextError(f"layer {layer}: this process has no connection to an FFN server")
    return metadata, metadata.connector


def _fake(rows: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    return None


def _fake_experts(
    rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    return None


_library.impl("remote_ffn", remote_ffn, "CompositeExplicitAutograd")
_library.impl("remote_experts", remote_experts, "CompositeExplicitAutograd")
torch.library.register_fake(OP_NAME, _fake, lib=_library)
torch.library.register_fake(EXPERTS_OP_NAME, _fake_experts, lib=_library)

#: What stand-ins call.
REMOTE_FFN: Any = torch.ops.afd_patch.remote_ffn
REMOTE_EXPERTS: Any = torch.ops.afd_patch.remote_experts
