"""One attention process as its FFN server sees it: a state machine over a non-blocking socket.

A ``Peer`` never waits. It turns bytes into complete, checked frames, and keeps what could not be sent yet. Headers are
checked in full before anything is allocated; the only buffer that depends on a peer is sized once, at the handshake.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque

import torch

from afd_patch.connectors import shared_memory, stream, wire
from afd_patch.connectors.wire import Header, Kind
from afd_patch.errors import ProtocolError
from afd_patch.identity import Identity

#: Seconds a peer has for its handshake, and for the rest of a frame once it has begun.
FRAME_TIMEOUT = 10.0


class Peer:
    """``frame`` returns complete frames; ``shared`` and ``rows_buffer`` exist after the handshake."""

    def __init__(self, sock: socket.socket, name: str, session: int) -> None:
        stream.prepare(sock)
        self.socket = sock
        self.name = name
        self.session = session
        self.welcome = False
        self.max_rows = 0
        self.shared: shared_memory.SharedRows | None = None
        self.rows_buffer: torch.Tensor | None = None
        self.deadline: float | None = time.monotonic() + FRAME_TIMEOUT
        self._fds: list[int] = []
        self._head = bytearray(wire.HEADER_SIZE)
        self._header: Header | None = None
        self._body: memoryview = memoryview(b"")
        self._filled = 0
        self._outgoing: deque[memoryview] = deque()

    # -- receiving ------------------------------------------------------------------------------------------------

    def read_header(self) -> Header | None:
        """The header of the next frame once it is complete; raises ``ConnectionError`` when the peer is gone."""
        while self._header is None:
            view = memoryview(self._head)[self._filled :]
            received = self._receive(view)
            if received is None:
                return None
            self._filled += received
            if self._filled == wire.HEADER_SIZE:
                self._header = wire.unpack(self._head)
                self._filled = 0
                return self._header
            if self.deadline is None:
                self.deadline = time.monotonic() + FRAME_TIMEOUT
        return self._header

    def read_body(self, buffer: memoryview) -> bool:
        """Receive the payload of the frame into ``buffer``; ``True`` when it is complete."""
        while self._filled < len(buffer):
            received = self._receive(buffer[self._filled :])
            if received is None:
                if self.deadline is None:
                    self.deadline = time.monotonic() + FRAME_TIMEOUT
                return False
            self._filled += received
        return True

    def text_body(self, header: Header) -> memoryview:
        """Where the payload of a handshake goes."""
        if header.payload > wire.MAX_TEXT:
            raise ProtocolError(f"{header.kind.name} announces {header.payload} bytes, more than {wire.MAX_TEXT}")
        if len(self._body) != header.payload:
            self._body = memoryview(bytearray(header.payload))
        return self._body

    def end_frame(self) -> None:
        self._header = None
        self._filled = 0
        self._body = memoryview(b"")
        self.deadline = None

    @property
    def first_bytes(self) -> bytes:
        """What the peer sent where a header should be."""
        return bytes(self._head)

    def _receive(self, view: memoryview) -> int | None:
        try:
            if self.welcome:
                received = self.socket.recv_into(view)
            else:  # the handshake may bring a file descriptor along
                data, fds, _, _ = socket.recv_fds(self.socket, len(view), 4)
                self._fds += fds
                received = len(data)
                view[:received] = data
        except BlockingIOError:
            return None
        if received == 0:
            raise ConnectionError("closed by the peer")
        return received

    # -- the handshake --------------------------------------------------------------------------------------------

    def accept(self, identity: Identity, area: object) -> None:
        """Make the buffers of a peer whose handshake was right; ``area`` is what it said of its shared memory."""
        if area is not None:
            expected = shared_memory.area_bytes(identity)
            if area != expected or len(self._fds) != 1:
                raise ProtocolError(f"shared memory of {area!r} bytes and {len(self._fds)} files; {expected} and 1 expected")
            shared_memory.check(self._fds[0], expected)
            self.shared = shared_memory.SharedRows(self._fds[0], expected)
        else:
            # Pages of this buffer become real when rows arrive in them.
            self.rows_buffer = torch.empty(
                identity.max_rows * identity.hidden_size, dtype=getattr(torch, identity.dtype)
            )
        self._close_fds()
        self.max_rows = identity.max_rows
        self.welcome = True

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts`` as far as the socket takes them; the rest waits for ``flush``."""
        self._outgoing.extend(memoryview(part) for part in parts)
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            part = self._outgoing[0]
            try:
                sent = self.socket.send(part)
            except BlockingIOError:
                if self.deadline is None:
                    self.deadline = time.monotonic() + FRAME_TIMEOUT
                return
            if sent < len(part):
                self._outgoing[0] = part[sent:]
            else:
                self._outgoing.popleft()
        if self._header is None and self.welcome:
            self.deadline = None

    @property
    def blocked(self) -> bool:
        """Whether bytes for this peer are still waiting."""
        return bool(self._outgoing)

    def close(self) -> None:
        self._close_fds()
        self.socket.close()
        self.shared = None
        self.rows_buffer = None

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def error_frame(header: Header, reason: str) -> bytes:
    """The answer to a call that failed."""
    return wire.text_frame(
        Kind.ERROR, {"reason": reason[:2000]}, session=header.session, transaction=header.transaction, call=header.call,
        layer=header.layer, stage=header.stage,
    )  # fmt: skip
