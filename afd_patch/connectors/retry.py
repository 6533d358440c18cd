"""RetryingConnector: calls that outlive a connection.

A call is a pure function of model, layer and rows, so it can be repeated anywhere. When a connection breaks, the call
is sent again over a new one, to the same server or to the next, until the call timeout has passed. Only a refusal and
an error that the FFN itself reported end it at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch

from afd_patch.connectors import columns
from afd_patch.connectors.client import Channel
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.log_limit import LogLimit
from afd_patch.errors import ConnectorError, HandshakeError, RemoteFFNError
from afd_patch.identity import Identity

logger = logging.getLogger("vllm.afd_patch")

#: Seconds between two attempts to reach a server that is not there.
RETRY_PAUSE = 0.1
#: Seconds between two log lines about the same cause.
PROGRESS = 5.0


class RetryingConnector:
    """An ``FFNConnector`` over the servers at ``endpoints``, as ``identity``. Times are seconds.

    Calls of several threads follow one another. ``close`` may come from any thread and ends what the others do.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], identity: Identity, *, connect_timeout: float, call_timeout: float,
        spin: float = 0.0,
    ) -> None:  # fmt: skip
        self.endpoints = tuple(endpoints)
        self._identity = identity
        self._dtype: torch.dtype = getattr(torch, identity.dtype)
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._spin = spin
        self._channel: Channel | None = None
        self._next = 0
        self._lock = threading.Lock()
        self._closed = False
        self._log_limit = LogLimit(PROGRESS)
        self.calls = 0
        self.reply_columns = identity.reply_columns
        self.repeats = 0

    def connect(self) -> None:
        """Shake hands with one server; wait up to the connect timeout for it to listen."""
        with self._lock:
            deadline = time.monotonic() + self._connect_timeout
            while True:
                try:
                    self._open(self._turn(deadline))
                    return
                except HandshakeError:
                    raise
                except (OSError, ConnectorError) as error:
                    self._end_if_closed(error)
                    if time.monotonic() >= deadline:
                        raise ConnectorError(
                            f"no FFN server answered at {self._names} within {self._connect_timeout:g} s ({error}); "
                            "start one with: python -m afd_patch.serve MODEL --role ffn --listen ENDPOINT, or raise "
                            "AFD_CONNECT_TIMEOUT"
                        ) from error
                    if self._log_limit.due("connect"):
                        logger.info("AFD attention: waiting for an FFN server at %s (%s)", self._names, error)
                    time.sleep(RETRY_PAUSE)

    def wait_ready(self) -> None:
        """Wait up to the connect timeout until the server has loaded its weights; a lost one is connected again."""
        with self._lock:
            deadline = time.monotonic() + self._connect_timeout
            turn = self._turn(deadline)
            while True:
                try:
                    channel = self._channel or self._open(turn)
                    if channel.wait_ready(min(turn, time.monotonic() + PROGRESS)):
                        return
                    cause = f"{channel.endpoint} is still loading"
                    if time.monotonic() >= turn:
                        self._drop()
                        turn = self._turn(deadline)
                except HandshakeError:
                    raise
                except (OSError, ConnectorError) as error:
                    self._drop()
                    self._end_if_closed(error)
                    cause, turn = str(error), self._turn(deadline)
                    time.sleep(RETRY_PAUSE)
                if time.monotonic() >= deadline:
                    raise ConnectorError(
                        f"the FFN server at {self._names} was not ready within {self._connect_timeout:g} s ({cause}); "
                        "look at its log, or raise AFD_CONNECT_TIMEOUT"
                    )
                if self._log_limit.due("ready"):
                    logger.info("AFD attention: waiting for the FFN server at %s (%s)", self._names, cause)

    def call(
        self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, side: Sequence[torch.Tensor] = (), stage: int = 0,
        transaction: int = 0,
    ) -> None:  # fmt: skip
        """See ``FFNConnector.call``."""
        self._check(layer, rows, side, out)
        if rows.shape[0] == 0:
            return
        deadline = time.monotonic() + self._call_timeout
        if not self._lock.acquire(timeout=self._call_timeout):
            raise ConnectorError(f"AFD attention: layer {layer}: the call before it took {self._call_timeout:g} s")
        try:
            self.calls += 1
            while True:
                limit = min(deadline, time.monotonic() + self._call_timeout / len(self.endpoints))
                channel = self._channel
                try:
                    channel = channel or self._open(limit)
                    if not channel.wait_ready(limit):
                        raise ConnectorError(f"{channel.endpoint} is still loading")
                    channel.call(
                        layer, rows, out, side=side, stage=stage, transaction=transaction, call=self.calls,
                        deadline=limit, spin=self._spin,
                    )  # fmt: skip
                    return
                except (HandshakeError, RemoteFFNError):
                    self._drop()
                    raise
                except (OSError, ConnectorError) as error:
                    self._repeat_or_fail(layer, channel, error, deadline)
                except BaseException:
                    self._drop()  # its reply may still come; nobody must take it for the next one
                    raise
        finally:
            self._lock.release()

    def _check(self, layer: int, rows: torch.Tensor, side: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """A call that can never be right is the caller's mistake; no server is asked for it."""
        identity = self._identity
        shape = rows.shape
        if (
            len(shape) == 2 and shape[0] <= identity.max_rows and shape[1] == identity.hidden_size
            and all(len(part.shape) == 2 and part.shape[0] == shape[0] for part in side)
            and columns.width_of(rows, side) == identity.request_columns
            and out.shape == (shape[0], identity.reply_columns)
            and rows.dtype == out.dtype == self._dtype and 0 <= layer < identity.layers
        ):  # fmt: skip
            return
        beside = "".join(f", {part.dtype} {tuple(part.shape)} beside them," for part in side)
        raise ConnectorError(
            f"AFD attention: layer {layer}: a call with {rows.dtype} rows {tuple(shape)}{beside} and an output of "
            f"{out.dtype} {tuple(out.shape)}; up to {identity.max_rows} x {identity.hidden_size} {identity.dtype} rows "
            f"of {identity.layers} layers, {identity.request_columns} columns with what crosses beside them, answered "
            f"in {identity.reply_columns} columns, were agreed with the FFN role"
        )

    def _repeat_or_fail(self, layer: int, channel: Channel | None, error: Exception, deadline: float) -> None:
        self._drop()
        self._end_if_closed(error)
        if time.monotonic() >= deadline:
            raise ConnectorError(
                f"AFD attention: layer {layer}: no FFN server at {self._names} answered within "
                f"{self._call_timeout:g} s ({error}); restart it, or raise AFD_CALL_TIMEOUT"
            ) from error
        if channel is not None:
            self.repeats += 1
        if self._log_limit.due(error):
            at = channel.endpoint if channel is not None else self._names
            logger.warning("AFD attention: layer %d: %s: %s; repeating the call", layer, at, error)
        time.sleep(min(RETRY_PAUSE, max(0.0, deadline - time.monotonic())))

    def _open(self, deadline: float) -> Channel:
        """A channel to the next server; with the next attempt it is the one after it."""
        endpoint = self.endpoints[self._next % len(self.endpoints)]
        self._channel = Channel(endpoint, self._identity)
        self._end_if_closed(None)
        try:
            self._channel.open(max(0.05, deadline - time.monotonic()))
        except BaseException:
            self._drop()
            raise
        return self._channel

    def _turn(self, deadline: float) -> float:
        """Until when to wait for one server at the start: a silent one must leave time for the others."""
        return min(deadline, time.monotonic() + self._connect_timeout / len(self.endpoints))

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._next += 1

    def _end_if_closed(self, cause: Exception | None) -> None:
        if self._closed:
            raise ConnectorError(f"the connection to the FFN role at {self._names} was closed") from cause

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.endpoints))

    def close(self) -> None:
        self._closed = True
        channel = self._channel
        if channel is not None:
            channel.abort()
        with self._lock:
            self._drop()
