"""A peer that says whatever a test wants to a real server."""

from __future__ import annotations

import os
import socket
import zlib
from typing import Any

from lab import SOON, identity

from afd_patch.connectors import shared_memory, wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import Header, Kind
from afd_patch.identity import Identity


def framed(header: Header, body: bytes) -> bytes:
    """A frame whose header is right about the length and the check of ``body``."""
    return header._replace(payload=len(body), check=wire.payload_check(body)).pack() + body


def sealed(frame: bytes | bytearray) -> bytes:
    """``frame`` with a right checksum over whatever its header has become."""
    fields = bytes(frame[: wire.HEADER_SIZE - 4])
    return fields + zlib.crc32(fields).to_bytes(4, "little") + bytes(frame[wire.HEADER_SIZE :])


class Raw:
    """A peer that says whatever a test wants to the server at ``endpoint``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.socket = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self.socket.connect(endpoint.address)
        self.socket.settimeout(SOON)
        self.session = 0

    def say(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def hello(self, who: Identity | None = None, fds: list[int] | None = None, **extra: Any) -> None:
        """Send a HELLO; with ``fds`` they go along."""
        frame = wire.text_frame(Kind.HELLO, {"identity": (who or identity()).to_json(), **extra})
        if fds is None:
            self.say(frame)
        else:
            socket.send_fds(self.socket, [frame], fds)

    def welcome(self, who: Identity | None = None) -> None:
        """Complete a right handshake, over any kind of endpoint."""
        who = who or identity()
        if self.socket.family == socket.AF_UNIX:
            fd = shared_memory.create(who)
            self.hello(who, [fd], shared_memory=shared_memory.file_bytes(who))
            os.close(fd)
        else:
            self.hello(who)
        header, _ = self.frame()
        assert header.kind is Kind.WELCOME
        self.session = header.session

    def frame(self) -> tuple[Header, bytes]:
        header = wire.unpack(self.receive(wire.HEADER_SIZE))
        return header, self.receive(header.payload)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError(f"closed after {len(data)} of {size} bytes")
            data += more
        return data

    def rest(self) -> bytes:
        """Everything until the server closes the connection; fails when it does not."""
        data = b""
        try:
            while more := self.socket.recv(1 << 16):
                data += more
        except ConnectionError:
            pass
        self.socket.close()
        return data

    def close(self) -> None:
        self.socket.close()
