"""The custom op ``afd_patch::remote_ffn``: rows out, rows in, opaque to every compiler.

The op writes to an output argument, because piecewise graphs need outputs at addresses they know. Everything it
needs is read inside its body, from the forward context: vLLM drops Dynamo's guards, so what traced Python reads is
frozen at the first compile.
"""

from __future__ import annotations

from typing import Any

import torch

from afd_patch.errors import ForwardContextError
from afd_patch.metadata import get_afd_metadata_from_forward_context

OP_NAME = "afd_patch::remote_ffn"


_library = torch.library.Library("afd_patch", "FRAGMENT")
_library.define("remote_ffn(Tensor rows, Tensor(a!) out, int layer) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))


def remote_ffn(rows: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Write the FFN of decoder layer ``layer``, applied to ``rows`` ``[tokens, hidden]``, to ``out`` (same shape)."""
    metadata = get_afd_metadata_from_forward_context()
    if metadata.connector is None:
        raise ForwardContextError(f"layer {layer}: this process has no connection to an FFN server")
    metadata.connector.call(layer, rows, out, stage=metadata.stage, transaction=metadata.transaction)


def _fake(rows: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    return None


_library.impl("remote_ffn", remote_ffn, "CompositeExplicitAutograd")
torch.library.register_fake(OP_NAME, _fake, lib=_library)

#: What stand-ins call.
REMOTE_FFN: Any = torch.ops.afd_patch.remote_ffn
