"""One attention process as its FFN server sees it: a state machine over a non-blocking socket.

A ``Peer`` never waits. It turns bytes into complete, checked frames, and keeps what could not be sent yet. Headers are
checked in full before anything is allocated; the only buffer that depends on a peer is sized once, at the handshake.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import torch

from afd_patch.connectors import shared_memory, stream, wire
from afd_patch.connectors.wire import Header, Kind
from afd_patch.errors import ProtocolError
from afd_patch.identity import Identity

#: Seconds a peer has for its handshake, and for the rest of a frame once it has begun.
FRAME_TIMEOUT = 10.0


class PeerLeft(Exception):
    """The peer closed its connection between two frames, which is how a connection ends."""


class NoDescriptor(Exception):
    """This process has no file descriptor left for the file that the peer sent; the peer may try again."""


class Peer:
    """``name`` is its session and, if it has one, its address, as the log tells it.

    ``welcome`` tells whether the handshake was right; ``requests`` and ``replies`` exist from then on;
    ``shared`` tells whether these are memory of both processes, or ours.
    """

    def __init__(self, sock: socket.socket, session: int, address: str) -> None:
        self.socket = sock
        self.session = session
        self.name = f"peer {session} from {address}" if address else f"peer {session}"
        self.welcome = False
        self.shared = False
        self.max_rows = 0
        self.calls = 0
        #: When its last call was answered.
        self.last_call = float("-inf")
        self.requests = torch.empty(0)
        self.replies = torch.empty(0)
        self.deadline: float | None = time.monotonic() + FRAME_TIMEOUT
        self._fds: list[int] = []
        self._head = memoryview(bytearray(wire.HEADER_SIZE))
        self._header: Header | None = None
        self._body = memoryview(b"")
        self._filled = 0
        self._outgoing: list[memoryview] = []
        sock.setblocking(False)
        stream.set_options(sock)

    # -- receiving ------------------------------------------------------------------------------------------------

    def read_header(self) -> Header | None:
        """The header of the present frame once it is complete; raises ``ConnectionError`` when the peer is gone."""
        while self._header is None:
            received = self._receive(self._head[self._filled :] if self._filled else self._head)
            if received is None:
                return None
            self._filled += received
            if self._filled < wire.HEADER_SIZE:
                wire.check_start(self._head[: self._filled])
                self._set_deadline()
            else:
                self._header = wire.unpack(self._head)
                self._filled = 0
        return self._header

    def read_body(self, buffer: memoryview) -> bool:
        """Receive the payload of the frame into ``buffer``; ``True`` when it is complete."""
        while self._filled < len(buffer):
            received = self._receive(buffer[self._filled :])
            if received is None:
                self._set_deadline()
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
            received = self.socket.recv_into(view) if self.welcome else self._receive_with_file(view)
        except BlockingIOError:
            return None
        if received == 0:
            raise PeerLeft() if self.welcome and not self.mid_frame else ConnectionError("closed by the peer")
        return received

    def _receive_with_file(self, view: memoryview) -> int:
        """Receive a part of the handshake, which may bring one file along."""
        try:
            return shared_memory.receive_with_fds(self.socket, view, self._fds)
        except ProtocolError:
            if len(self._fds) > 1:
                raise
            # There was room for two: the kernel had a file for us and could not hand it over.
            reason = "no file descriptor is left for its shared memory; raise their limit (ulimit -n)"
            raise NoDescriptor(reason) from None

    def _set_deadline(self) -> None:
        if self.deadline is None:
            self.deadline = time.monotonic() + FRAME_TIMEOUT

    # -- the handshake --------------------------------------------------------------------------------------------

    def accept(self, identity: Identity, size: object) -> None:
        """Make the buffers of a peer whose handshake was right; ``size`` is what it said of its shared memory."""
        self.shared = size is not None
        if self.shared:
            if type(size) is not int or size != shared_memory.file_bytes(identity) or len(self._fds) != 1:
                raise ProtocolError("the peer's shared memory does not have the size that its handshake implies")
            shared_memory.check(self._fds[0], identity)
            memory = shared_memory.SharedRows(self._fds[0], identity)
            self.requests, self.replies = memory.requests, memory.replies
        else:
            # Pages of this buffer become real when rows arrive in them.
            shape = (identity.max_rows, identity.request_columns)
            self.requests = torch.empty(shape, dtype=getattr(torch, identity.dtype))
        self._close_fds()
        self.max_rows = identity.max_rows
        self.welcome = True

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts`` as far as the socket takes them; a copy of the rest waits for ``flush``."""
        self._outgoing.extend(memoryview(part) for part in parts if len(part))
        self.flush()
        if self._outgoing:  # whoever computes next may write to the memory behind ``parts``
            self._outgoing = [memoryview(bytes(part)) for part in self._outgoing]

    def flush(self) -> None:
        """Send what is waiting, as far as the socket takes it."""
        outgoing = self._outgoing
        while outgoing:
            try:
                sent = self.socket.sendmsg(outgoing)
            except BlockingIOError:
                self._set_deadline()
                return
            while outgoing and sent >= len(outgoing[0]):
                sent -= len(outgoing.pop(0))
            if outgoing:
                outgoing[0] = outgoing[0][sent:]
        if self.welcome and not self.mid_frame:
            self.deadline = None

    def send_last(self, data: bytes) -> None:
        """Say ``data``, if the socket takes it, and nothing more; ``close`` is still due."""
        with suppress(OSError):
            self.socket.send(data)
            self.socket.shutdown(socket.SHUT_WR)
            # TCP would throw away what we said if anything were left unread.
            for _ in range(16):
                if not self.socket.recv(wire.MAX_TEXT):
                    break

    @property
    def blocked(self) -> bool:
        """Whether bytes for this peer are still waiting."""
        return bool(self._outgoing)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame of this peer has begun and is not complete."""
        return self._header is not None or self._filled > 0

    @property
    def closed(self) -> bool:
        return self.socket.fileno() < 0

    def close(self) -> None:
        """Close the connection, also for processes that were forked while it existed."""
        self._close_fds()
        stream.shut_down(self.socket)
        self.socket.close()
        self.requests = self.replies = torch.empty(0)
        self._outgoing = []

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
