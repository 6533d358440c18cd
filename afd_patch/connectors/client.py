"""The attention side of a connection to one FFN server: handshake, and one call at a time.

A ``Channel`` is one connection. It never repeats anything; that is what ``retry.py`` does with a new one.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch

from afd_patch.connectors import shared_memory, stream, wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.errors import ConnectorError, HandshakeError, ProtocolError, RemoteFFNError
from afd_patch.identity import Identity

WIRE_DTYPES = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16, torch.float32: DType.FLOAT32}
#: Seconds for the peer to answer a handshake once it is connected.
HANDSHAKE_TIMEOUT = 10.0


class Channel:
    """One connection to ``endpoint``, after a successful handshake as ``identity``."""

    def __init__(self, endpoint: Endpoint, identity: Identity, timeout: float) -> None:
        """Connect and shake hands within ``timeout`` seconds.

        Raises ``OSError`` when nobody listens, ``HandshakeError`` when the server refuses, ``ConnectorError`` when
        it does not answer.
        """
        self.endpoint = endpoint
        self._identity = identity
        self._header = memoryview(bytearray(wire.HEADER_SIZE))
        self._shared: shared_memory.SharedRows | None = None
        self._socket = stream.connect(endpoint, timeout)
        try:
            self._shake_hands(time.monotonic() + min(timeout, HANDSHAKE_TIMEOUT))
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, deadline: float) -> None:
        hello: dict[str, Any] = {"identity": self._identity.to_json()}
        if self._socket.family == socket.AF_UNIX:
            area = shared_memory.area_bytes(self._identity)
            fd = shared_memory.create(area)
            try:
                self._shared = shared_memory.SharedRows(fd, area)
                hello["shared_memory"] = area
                shared_memory.send_with_fd(self._socket, wire.text_frame(Kind.HELLO, hello), fd)
            finally:
                os.close(fd)
        else:
            stream.send_exactly(self._socket, wire.text_frame(Kind.HELLO, hello), deadline)
        header, content = self._receive_text(deadline)
        if header.kind is Kind.REFUSE:
            raise HandshakeError(f"{self.endpoint} refused: {content.get('reason')}")
        if header.kind is not Kind.WELCOME:
            raise ProtocolError(f"{self.endpoint} answered the handshake with {header.kind.name}")
        self.session = header.session
        self.ready = bool(content.get("ready"))
        self.server: dict[str, Any] = content.get("identity") or {}

    def wait_ready(self, deadline: float) -> bool:
        """Wait until the server has loaded its weights; ``False`` when ``deadline`` passes first."""
        if self.ready:
            return True
        try:
            stream.receive_exactly(self._socket, self._header, deadline)
        except ConnectorError:
            if time.monotonic() >= deadline:
                return False
            raise
        header = wire.unpack(self._header)
        if header.kind is not Kind.READY:
            raise ProtocolError(f"{self.endpoint} sent {header.kind.name} before READY")
        self.ready = True
        return True

    def call(
        self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, stage: int, transaction: int, call: int,
        deadline: float, spin: float,
    ) -> None:  # fmt: skip
        """One call; see ``FFNConnector.call``. A ``Channel`` that raised is of no use any more."""
        count, width = rows.shape
        shared = self._shared
        request = Header(
            Kind.CALL, self.session, transaction, call, layer, stage, WIRE_DTYPES[rows.dtype], count, width,
            wire.FLAG_SHARED_MEMORY if shared else 0, 0 if shared else rows.nbytes,
        ).pack()  # fmt: skip
        if shared is not None:
            shared.request(count, width, rows.dtype).copy_(rows)
            stream.send_exactly(self._socket, request, deadline)
        else:
            stream.send_exactly(self._socket, request, deadline)
            stream.send_exactly(self._socket, _bytes_of(rows.contiguous()), deadline)
        stream.receive_exactly(self._socket, self._header, deadline, spin)
        reply = wire.unpack(self._header)
        if reply.kind is Kind.ERROR:
            content = self._receive_body(reply, deadline)
            raise RemoteFFNError(f"{self.endpoint}, layer {layer}: {content.get('reason')}")
        expected = (Kind.REPLY, self.session, transaction, call, layer, stage, WIRE_DTYPES[out.dtype], count, width)
        got = (
            reply.kind, reply.session, reply.transaction, reply.call, reply.layer, reply.stage, reply.dtype, reply.rows,
            reply.width,
        )  # fmt: skip
        if got != expected or reply.payload != (0 if shared else out.nbytes):
            raise ProtocolError(f"{self.endpoint}, layer {layer}: the reply belongs to another call ({reply})")
        if shared is not None:
            out.copy_(shared.reply(count, width, out.dtype))
        elif out.device.type == "cpu" and out.is_contiguous():
            stream.receive_exactly(self._socket, _bytes_of(out), deadline)
        else:
            landing = torch.empty(out.shape, dtype=out.dtype)
            stream.receive_exactly(self._socket, _bytes_of(landing), deadline)
            out.copy_(landing)

    def _receive_text(self, deadline: float) -> tuple[Header, dict[str, Any]]:
        stream.receive_exactly(self._socket, self._header, deadline)
        header = wire.unpack(self._header)
        return header, self._receive_body(header, deadline)

    def _receive_body(self, header: Header, deadline: float) -> dict[str, Any]:
        if header.payload > wire.MAX_TEXT:
            raise ProtocolError(f"{self.endpoint} announced {header.payload} bytes of text")
        body = memoryview(bytearray(header.payload))
        stream.receive_exactly(self._socket, body, deadline)
        return wire.parse_text(body)

    def close(self) -> None:
        self._socket.close()
        self._shared = None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes."""
    source = tensor if tensor.device.type == "cpu" else tensor.cpu()
    return memoryview(source.view(torch.uint8).numpy()).cast("B")
