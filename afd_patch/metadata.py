"""``additional_kwargs["afd_metadata"]``: what a forward of an active role carries, and its only reader.

The entry is installed by ``patches/forward_context.py`` whenever vLLM creates a forward context, so it is there in
dummy, profile and warm-up runs and under both model runners. It is valid for that forward only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd_patch.errors import ForwardContextError

if TYPE_CHECKING:
    from afd_patch.connectors.contract import FFNConnector

#: The key in ``ForwardContext.additional_kwargs``.
AFD_METADATA = "afd_metadata"


@dataclass(frozen=True, slots=True)
class AFDForwardContextMetadata:
    """One forward of one role.

    ``stage`` of ``stage_count`` micro-batches; ``request_slices`` and ``token_slices`` are those of the stages, empty
    when the batch is whole. ``transaction`` counts the forwards of this process. ``connector`` moves rows to the FFN
    role; it is ``None`` in the FFN role, which calls nobody.
    """

    role: str
    transaction: int
    connector: FFNConnector | None
    stage: int = 0
    stage_count: int = 1
    request_slices: tuple[slice, ...] = ()
    token_slices: tuple[slice, ...] = ()


def get_afd_metadata_from_forward_context() -> AFDForwardContextMetadata:
    """The metadata of the forward that is running; raises ``ForwardContextError`` where there is none."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        raise ForwardContextError("no forward context is set, so there is no FFN to send rows to")
    metadata = get_forward_context().additional_kwargs.get(AFD_METADATA)
    if metadata is None:
        raise ForwardContextError(
            "the forward context carries no afd_metadata: this model was built for the attention role, which is not "
            "active any more; activate it again before running the model, or build a new one"
        )
    return metadata
