"""A network between the two roles that misbehaves on demand: it cuts, delays, truncates and corrupts single frames.

It knows where frames begin, forwards handshakes untouched (also the file descriptor of the shared memory), and
disturbs only calls and replies. Corruption is one flipped bit, in the header or in the rows. Rows in shared memory do
not come this way.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import HEADER_SIZE, Header, Kind, unpack
from afd_patch.errors import ProtocolError

logger = logging.getLogger("vllm.afd_patch")

DISTURBANCES = ("cut", "delay", "truncate", "corrupt")
_CHUNK = 1 << 18


@dataclass
class Disturbance:
    """What happens to the next frame of ``direction`` (``call`` or ``reply``); ``done`` is set when it has."""

    kind: str
    direction: str
    seconds: float
    done: threading.Event


class Proxy:
    """Listens at ``endpoint`` and connects to ``target`` for every connection, until ``close``."""

    def __init__(self, endpoint: Endpoint, target: Endpoint, rng: random.Random) -> None:
        self.connections = 0
        self._target = target
        self._rng = rng
        self._armed: list[Disturbance] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self._listener.bind(endpoint.address)
        self._listener.listen(16)
        threading.Thread(target=self._accept, name="chaos proxy", daemon=True).start()

    def disturb(self, kind: str, direction: str, seconds: float) -> Disturbance:
        """Arm a disturbance; ``seconds`` is for how long ``delay`` and ``truncate`` keep silent."""
        armed = Disturbance(kind, direction, seconds, threading.Event())
        with self._lock:
            self._armed.append(armed)
        return armed

    def disarm(self) -> list[Disturbance]:
        """Forget what has met no frame yet, and say what that was."""
        with self._lock:
            forgotten, self._armed = self._armed, []
        return forgotten

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            _shut(sock)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(self._target.family, socket.SOCK_STREAM)
            try:
                far.connect(self._target.address)
            except OSError:  # the server is not there: neither is the network to it
                near.close()
                far.close()
                continue
            self.connections += 1
            for sock in (near, far):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.add(sock)
            for source, sink, direction in ((near, far, "call"), (far, near, "reply")):
                threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        try:
            while self._forward_frame(source, sink, direction):
                pass
        except OSError:
            pass
        except ProtocolError as error:
            logger.warning("the chaos proxy hangs up, because it cannot tell where frames begin: %s", error)
        finally:
            for sock in (source, sink):
                _shut(sock)
            self._sockets.discard(source)
            # The socket itself is closed with the last reference: the other direction may still be in it.

    def _forward_frame(self, source: socket.socket, sink: socket.socket, direction: str) -> bool:
        received = _receive_header(source)
        if received is None:
            return False
        frame, header, fds = received
        disturbance = self._take(direction) if frame.kind in (Kind.CALL, Kind.REPLY) else None
        length, flipped = frame.payload, -1
        allowed = HEADER_SIZE + length
        if disturbance is not None:
            if disturbance.kind == "delay":
                time.sleep(disturbance.seconds)
            elif disturbance.kind == "corrupt":
                # As often in the header as in the rows, which are far longer.
                flipped = self._rng.choice((self._rng.randrange(HEADER_SIZE), self._rng.randrange(allowed)))
            else:
                allowed = self._rng.randrange(allowed)
            disturbance.done.set()
        _flip(header, flipped)
        _send(sink, header[:allowed], fds)
        left = length
        while left:
            data = bytearray(source.recv(min(left, _CHUNK)))
            if not data:
                return False
            place = HEADER_SIZE + length - left
            _flip(data, flipped - place)
            sink.sendall(data[: max(0, allowed - place)])
            left -= len(data)
        if disturbance is not None and disturbance.kind == "truncate":
            time.sleep(disturbance.seconds)  # the line looks alive, and the rest does not come
        return disturbance is None or disturbance.kind in ("delay", "corrupt")

    def _take(self, direction: str) -> Disturbance | None:
        with self._lock:
            for armed in self._armed:
                if armed.direction == direction:
                    self._armed.remove(armed)
                    return armed
        return None


def _receive_header(source: socket.socket) -> tuple[Header, bytearray, list[int]] | None:
    """The next header, its bytes, and the file descriptors that came with it; ``None`` when the line ended."""
    data, fds = bytearray(), list[int]()
    with ExitStack() as stack:
        stack.callback(_close, fds)
        while len(data) < HEADER_SIZE:
            if source.family == socket.AF_UNIX:
                part, received, _, _ = socket.recv_fds(source, HEADER_SIZE - len(data), 4)
                fds += received
            else:
                part = source.recv(HEADER_SIZE - len(data))
            if not part:
                return None
            data += part
        header = unpack(data)
        stack.pop_all()
        return header, data, fds


def _send(sink: socket.socket, data: bytes | bytearray, fds: list[int]) -> None:
    try:
        if fds and data:
            sent = socket.send_fds(sink, [bytes(data)], fds)
            data = data[sent:]
        sink.sendall(data)
    finally:
        _close(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _flip(data: bytearray, place: int) -> None:
    """Turn over a bit of the byte at ``place``, if ``data`` has such a byte."""
    if 0 <= place < len(data):
        data[place] ^= 1 << place % 8


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
