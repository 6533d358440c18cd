"""RetryingConnector: calls that outlive a connection.

A call is a pure function of model, layer and rows, so it can be repeated anywhere. When a connection breaks, the call
is sent again over a new one, to the same server or to the next, until the call timeout has passed. Only a refusal and
an error that the FFN itself reported end it at once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence

import torch

from afd_patch.connectors.client import Channel
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.errors import ConnectorError, HandshakeError, RemoteFFNError
from afd_patch.identity import Identity

logger = logging.getLogger("vllm.afd_patch")

#: Seconds between two attempts to reach a server that is not there.
RETRY_PAUSE = 0.1
#: Seconds between two progress lines while waiting.
PROGRESS = 5.0


class RetryingConnector:
    """An ``FFNConnector`` over the servers at ``endpoints``, as ``identity``. Times are seconds."""

    def __init__(
        self, endpoints: Sequence[Endpoint], identity: Identity, *, connect_timeout: float, call_timeout: float,
        spin: float = 0.0,
    ) -> None:  # fmt: skip
        self.endpoints = tuple(endpoints)
        self._identity = identity
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._spin = spin
        self._channel: Channel | None = None
        self._next = 0
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self.calls = 0
        self.repeats = 0

    def connect(self) -> None:
        """Shake hands with one server; wait up to the connect timeout for it to listen."""
        deadline = time.monotonic() + self._connect_timeout
        report = time.monotonic() + PROGRESS
        while True:
            try:
                self._open(deadline)
                return
            except HandshakeError:
                raise
            except (OSError, ConnectorError) as error:
                now = time.monotonic()
                if now >= deadline:
                    raise ConnectorError(
                        f"no FFN server answered at {self._names} within {self._connect_timeout:g} s ({error}); start "
                        "one with: python -m afd_patch.serve MODEL --role ffn --listen ENDPOINT, or raise "
                        "AFD_CONNECT_TIMEOUT"
                    ) from error
                if now >= report:
                    logger.info("AFD attention: waiting for an FFN server at %s (%s)", self._names, error)
                    report = now + PROGRESS
                time.sleep(RETRY_PAUSE)

    def wait_ready(self) -> None:
        """Wait up to the connect timeout until the server has loaded its weights; a lost one is connected again."""
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                channel = self._channel or self._open(deadline)
                if channel.wait_ready(min(deadline, time.monotonic() + PROGRESS)):
                    return
                cause = "it is still loading"
            except HandshakeError:
                raise
            except (OSError, ConnectorError) as error:
                self._drop()
                cause = str(error)
                time.sleep(RETRY_PAUSE)
            if time.monotonic() >= deadline:
                raise ConnectorError(
                    f"the FFN server at {self._names} was not ready within {self._connect_timeout:g} s ({cause}); look "
                    "at its log, or raise AFD_CONNECT_TIMEOUT"
                )
            logger.info("AFD attention: waiting for the FFN server at %s to load its weights", self._names)

    def call(self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, stage: int = 0, transaction: int = 0) -> None:
        """See ``FFNConnector.call``."""
        with self._lock:
            self.calls += 1
            number = next(self._calls)
            deadline = time.monotonic() + self._call_timeout
            while True:
                try:
                    channel = self._channel or self._open(deadline)
                    if not channel.wait_ready(deadline):
                        raise ConnectorError("the FFN server is still loading")
                    channel.call(
                        layer, rows, out, stage=stage, transaction=transaction, call=number,
                        deadline=min(deadline, time.monotonic() + self._call_timeout / len(self.endpoints)),
                        spin=self._spin,
                    )  # fmt: skip
                    return
                except (HandshakeError, RemoteFFNError):
                    self._drop()
                    raise
                except (OSError, ConnectorError) as error:
                    self._repeat_or_fail(layer, error, deadline)

    def _repeat_or_fail(self, layer: int, error: Exception, deadline: float) -> None:
        first = self._channel is not None
        self._drop()
        if self._closed:
            raise ConnectorError("the connection to the FFN role was closed") from error
        if time.monotonic() >= deadline:
            raise ConnectorError(
                f"AFD attention: layer {layer}: no FFN server at {self._names} answered within "
                f"{self._call_timeout:g} s ({error}); restart it, or raise AFD_CALL_TIMEOUT"
            ) from error
        if first:
            logger.warning("AFD attention: layer %d: %s: %s; repeating the call", layer, self._names, error)
            self.repeats += 1
        time.sleep(RETRY_PAUSE)

    def _open(self, deadline: float) -> Channel:
        if self._closed:
            raise ConnectorError("the connection to the FFN role was closed")
        endpoint = self.endpoints[self._next % len(self.endpoints)]
        self._next += 1
        self._channel = Channel(endpoint, self._identity, max(0.05, deadline - time.monotonic()))
        self._next -= 1  # stay with a server that works
        return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._next += 1

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.endpoints))

    def close(self) -> None:
        self._closed = True
        self._drop()
