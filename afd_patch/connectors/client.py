"""The attention side of a connection to one FFN server: handshake, and one call at a time.

A ``Channel`` is one connection. It never repeats anything; that is what ``retry.py`` does with a new one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from afd_patch.connectors import columns, shared_memory, stream, wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.errors import HandshakeError, ProtocolError, RemoteFFNError
from afd_patch.identity import Identity

WIRE_DTYPES = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16, torch.float32: DType.FLOAT32}
#: Seconds for the peer to answer a handshake once it is connected, and for the rest of a frame once it has begun.
HANDSHAKE_TIMEOUT = 10.0


class Channel:
    """One connection to ``endpoint`` as ``identity``; of use after ``open``, until something raised."""

    def __init__(self, endpoint: Endpoint, identity: Identity) -> None:
        self.endpoint = endpoint
        self.session = 0
        self.ready = False
        self._identity = identity
        self._dtype = WIRE_DTYPES[getattr(torch, identity.dtype)]
        self._header = memoryview(bytearray(wire.HEADER_SIZE))
        self._shared: shared_memory.SharedRows | None = None
        self._socket = socket.socket(endpoint.family, socket.SOCK_STREAM)

    def open(self, timeout: float) -> None:
        """Connect and shake hands within ``timeout`` seconds.

        Raises ``OSError`` when nobody listens, ``HandshakeError`` when the two do not belong together,
        ``ConnectorError`` when the server does not answer, or not as an FFN server would.
        """
        deadline = time.monotonic() + timeout
        stream.connect(self._socket, self.endpoint, timeout)
        self._shake_hands(min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT))

    def _shake_hands(self, deadline: float) -> None:
        self._send_hello(deadline)
        try:
            header, content = self._receive_text(deadline)
        except wire.VersionError as error:
            raise HandshakeError(f"{self.endpoint}: {error}") from None
        if header.kind is Kind.REFUSE:
            raise HandshakeError(f"{self.endpoint} refused: {content.get('reason')}")
        if header.kind is not Kind.WELCOME:
            raise ProtocolError(f"{self.endpoint} answered the handshake with {header.kind.name}")
        server = Identity.from_json(content.get("identity"))
        reason = self._identity.mismatch(server) or server.too_many_rows(self._identity)
        if reason is not None:
            raise HandshakeError(f"{self.endpoint}: {reason}")
        self.session = header.session
        self.ready = content.get("ready") is True

    def _send_hello(self, deadline: float) -> None:
        hello: dict[str, Any] = {"identity": self._identity.to_json()}
        if self._socket.family != socket.AF_UNIX:
            stream.send_exactly(self._socket, deadline, wire.text_frame(Kind.HELLO, hello))
            return
        hello["shared_memory"] = shared_memory.file_bytes(self._identity)
        fd = shared_memory.create(self._identity)
        try:
            self._shared = shared_memory.SharedRows(fd, self._identity)
            shared_memory.send_with_fd(self._socket, wire.text_frame(Kind.HELLO, hello), fd)
        finally:
            os.close(fd)

    def wait_ready(self, deadline: float) -> bool:
        """Wait until the server has loaded its weights; ``False`` when ``deadline`` passes first."""
        if self.ready:
            return True
        if not stream.wait_readable(self._socket, deadline):
            return False
        # Once it has begun, it is received completely, or this connection is of no use any more.
        stream.receive_exactly(self._socket, self._header, deadline, rest=HANDSHAKE_TIMEOUT)
        header = wire.unpack(self._header)
        if header != Header(Kind.READY, self.session):
            raise ProtocolError(f"{self.endpoint} sent {header.kind.name} before READY")
        self.ready = True
        return True

    def call(
        self, layer: int, rows: torch.Tensor, out: torch.Tensor, *, side: Sequence[torch.Tensor] = (), stage: int,
        transaction: int, call: int, deadline: float, spin: float,
    ) -> None:  # fmt: skip
        """One call; see ``FFNConnector.call``. ``rows``, ``side`` and ``out`` are what the handshake promised."""
        count = rows.shape[0]
        identity = self._identity
        shared = self._shared
        flags = wire.FLAG_SHARED_MEMORY if shared else 0
        if shared is not None:
            columns.put(shared.requests[:count], rows, side)
            payload = memoryview(b"")
        else:
            payload = _bytes_of(columns.joined(rows, side))
        request = Header(
            Kind.CALL, self.session, transaction, call, layer, stage, self._dtype, count,
            identity.request_columns, flags, len(payload), wire.payload_check(payload) if payload else 0,
        )  # fmt: skip
        expected = Header(
            Kind.REPLY, self.session, transaction, call, layer, stage, self._dtype, count,
            identity.reply_columns, flags, 0 if shared else out.nbytes,
        )  # fmt: skip
        stream.send_exactly(self._socket, deadline, request.pack(), payload)
        stream.receive_exactly(self._socket, self._header, deadline, spin, rest=HANDSHAKE_TIMEOUT)
        deadline = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT)
        if shared is None:
            self._receive_rows(expected, out, deadline, spin)
        elif self._header == expected.pack():
            out.copy_(shared.replies[:count])
        else:
            self._explain(layer, call, deadline)

    def _receive_rows(self, expected: Header, out: torch.Tensor, deadline: float, spin: float) -> None:
        """The rest of a reply whose rows come in the stream."""
        header = wire.unpack(self._header)
        if header._replace(check=0) != expected:
            self._explain(expected.layer, expected.call, deadline)
        direct = out.device.type == "cpu" and out.is_contiguous()
        landing = out if direct else torch.empty(out.shape, dtype=out.dtype)
        payload = _bytes_of(landing)
        stream.receive_exactly(self._socket, payload, deadline, spin)
        wire.verify_payload(header, payload)
        if not direct:
            out.copy_(landing)

    def _explain(self, layer: int, call: int, deadline: float) -> None:
        """Raise what it means that the header just received is not the one of the reply."""
        header = wire.unpack(self._header)
        if header.kind is Kind.ERROR and (header.session, header.call) == (self.session, call):
            content = self._receive_body(header, deadline)
            raise RemoteFFNError(f"{self.endpoint}, layer {layer}: {content.get('reason')}")
        raise ProtocolError(f"{self.endpoint}: the reply belongs to another call ({header})")

    def _receive_text(self, deadline: float) -> tuple[Header, dict[str, Any]]:
        stream.receive_exactly(self._socket, self._header, deadline)
        header = wire.unpack(self._header)
        return header, self._receive_body(header, deadline)

    def _receive_body(self, header: Header, deadline: float) -> dict[str, Any]:
        if header.payload > wire.MAX_TEXT:
            raise ProtocolError(f"{self.endpoint} announced {header.payload} bytes of text")
        body = memoryview(bytearray(header.payload))
        stream.receive_exactly(self._socket, body, deadline)
        return wire.parse_text(header, body)

    def abort(self) -> None:
        """Make a wait in another thread end with an error; ``close`` is still due."""
        stream.shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()
        self._shared = None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes."""
    source = tensor if tensor.device.type == "cpu" else tensor.cpu()
    return memoryview(source.view(torch.uint8).numpy()).cast("B")
