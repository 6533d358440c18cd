"""The contract between the attention role and whatever moves its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class FFNConnector(Protocol):
    """Computes one layer's FFN somewhere else; ``calls`` counts, ``reply_columns`` is that of the identity."""

    reply_columns: int

    @property
    def calls(self) -> int: ...

    def call(
        self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, side: Sequence[torch.Tensor] = (), stage: int = 0,
        transaction: int = 0,
    ) -> None:  # fmt: skip
        """Send ``rows`` ``[tokens, hidden]`` to the FFN of ``layer`` and write its result to ``out``.

        ``side`` crosses next to the rows: tensors ``[tokens, values]``, which fill up the ``request_columns`` of the
        identity bit for bit (see ``columns.py``). ``stage`` and ``transaction`` are those of the forward (see
        ``AFDForwardContextMetadata``). ``out`` is ``[tokens, reply_columns]``, of the same dtype;
        it is never a view of a receive buffer, and ``rows`` and ``side`` are left as they are. Returns when ``out`` is
        complete, or raises ``ConnectorError`` within the call timeout.
        """

    def close(self) -> None:
        """Release sockets and buffers; a call after that raises ``ConnectorError``."""
