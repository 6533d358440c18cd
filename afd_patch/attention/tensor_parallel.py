"""The connector of one rank of a tensor-parallel attention role: rank 0 calls, and every rank gets the result.

All ranks of vLLM's tensor-parallel group hold the same rows before an FFN, and all need its complete result. So one
copy of the rows crosses, from rank 0, and vLLM's own group broadcasts what came back. How rank 0 fared travels with
the result: a rank that has no connection never waits for one that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from afd_patch.connectors.retry import RetryingConnector
from afd_patch.errors import AFDError, ConnectorError
from afd_patch.identity import Identity

#: In front of the result of each broadcast, as int64: whether the call failed, and the layer.
_HEAD = 2
_HEAD_BYTES = 8 * _HEAD


class GroupConnector:
    """An ``FFNConnector`` for the rank of this process in ``group``, vLLM's tensor-parallel ``GroupCoordinator``.

    ``connector`` is the connection of rank 0, and ``None`` on every other rank. ``calls`` are those of this rank, so
    the sum over all ranks is what an FFN server was asked. All ranks must make the same calls in the same order, as
    they do in vLLM's own collectives.
    """

    def __init__(self, group: Any, connector: RetryingConnector | None, identity: Identity) -> None:
        self._group = group
        self._connector = connector
        self.reply_columns = identity.reply_columns
        dtype: torch.dtype = getattr(torch, identity.dtype)
        self._capacity = _HEAD_BYTES + identity.max_rows * identity.reply_columns * dtype.itemsize
        self._message: torch.Tensor | None = None

    @property
    def calls(self) -> int:
        return 0 if self._connector is None else self._connector.calls

    def connect(self) -> None:
        """``RetryingConnector.connect`` on rank 0; raises ``ConnectorError`` on every rank when it fails there."""
        self._on_rank_0(RetryingConnector.connect)

    def wait_ready(self) -> None:
        """``RetryingConnector.wait_ready`` on rank 0; raises ``ConnectorError`` on every rank when it fails there."""
        self._on_rank_0(RetryingConnector.wait_ready)

    def _on_rank_0(self, action: Callable[[RetryingConnector], None]) -> None:
        error: AFDError | None = None
        if self._connector is not None:
            try:
                action(self._connector)
            except AFDError as failure:
                error = failure
        reason = self._group.broadcast_object(None if error is None else str(error))
        if error is not None:
            raise error
        if reason is not None:
            raise ConnectorError(f"tensor-parallel rank 0 has no FFN server: {reason}")

    def call(
        self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, side: Sequence[torch.Tensor] = (), stage: int = 0,
        transaction: int = 0,
    ) -> None:  # fmt: skip
        """See ``FFNConnector.call``; raises ``ConnectorError`` on every rank when the call of rank 0 fails."""
        if rows.shape[0] == 0:
            return
        message = self._message_for(out)
        head = message[:_HEAD_BYTES].view(torch.int64)
        result = message[_HEAD_BYTES:].view(out.dtype).view(out.shape)
        error: AFDError | None = None
        if self._connector is not None:
            try:
                self._connector.call(layer, rows, result, side=side, stage=stage, transaction=transaction)
            except AFDError as failure:
                error = failure
            head.copy_(torch.tensor((error is not None, layer)))
        self._group.broadcast(message, src=0)
        if error is not None:
            raise error
        failed, at = head.tolist()
        if failed or at != layer:
            what = "failed" if failed else f"was one of layer {at}"
            raise ConnectorError(f"AFD attention: layer {layer}: the call of tensor-parallel rank 0 {what}")
        out.copy_(result)

    def _message_for(self, out: torch.Tensor) -> torch.Tensor:
        """The part of this rank's buffer that carries a result like ``out``."""
        size = _HEAD_BYTES + out.numel() * out.element_size()
        if size > self._capacity:  # on every rank: all have rows of the same shape
            raise ConnectorError(f"a call with {tuple(out.shape)} rows, more than were agreed with the FFN role")
        if self._message is None or self._message.device != out.device:
            with torch.inference_mode(False):  # or it could not be written to outside of inference mode
                self._message = torch.empty(self._capacity, dtype=torch.uint8, device=out.device)
        return self._message[:size]

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
