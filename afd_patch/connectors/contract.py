"""The contract between the attention role and whatever moves its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class FFNConnector(Protocol):
    """Computes one layer's FFN somewhere else; ``calls`` counts."""

    calls: int

    def call(self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, stage: int = 0, transaction: int = 0) -> None:
        """Send ``rows`` ``[tokens, hidden]`` to the FFN of ``layer`` and write its result to ``out``.

        ``stage`` and ``transaction`` are those of the forward (see ``AFDForwardContextMetadata``). ``out`` has the
        shape of ``rows`` and the ``reply_dtype`` of the identity; it is never a view of a receive buffer, and ``rows``
        is left as it is. Returns when ``out`` is complete, or raises ``ConnectorError`` within the call timeout.
        """

    def close(self) -> None:
        """Release sockets and buffers; a call after that raises ``ConnectorError``."""
