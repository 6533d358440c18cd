"""Servers and networks that misbehave on purpose, in threads of the test."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from types import TracebackType

import torch
from lab import SOON, identity, reference

from afd_patch.connectors import wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.stream import set_options
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.identity import Identity


class Accepting:
    """Listens at ``endpoint`` while the block lasts; every connection gets a thread that runs ``handle``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.accepted = 0
        self._listener = socket.create_server(endpoint.address, family=endpoint.family)  # type: ignore[arg-type]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def handle(self, number: int, sock: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            set_options(sock)
            sock.settimeout(SOON)
            self.track(sock)
            self.accepted += 1
            self.run(self._guarded, self.accepted - 1, sock)

    def _guarded(self, number: int, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.handle(number, sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def run(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def track(self, sock: socket.socket) -> None:
        self._sockets.append(sock)

    def __enter__(self) -> Accepting:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(SOON)
        for sock in self._sockets:
            sock.close()


class FakeServer(Accepting):
    """Runs ``script`` for every connection."""

    def __init__(self, endpoint: Endpoint, script: Callable[[FakePeer], object]) -> None:
        super().__init__(endpoint)
        self._script = script

    def handle(self, number: int, sock: socket.socket) -> None:
        self._script(FakePeer(sock, number))


class FakePeer:
    """The connection of one client, as a fake server sees it; ``number`` counts connections from 0."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.socket = sock
        self.number = number
        self.session = 100 + number

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError("closed")
            data += more
        return data

    def say(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def welcome(self, who: Identity | None = None, ready: bool = True) -> None:
        header = wire.unpack(self.receive(wire.HEADER_SIZE))
        self.receive(header.payload)
        content = {"ready": ready, "identity": (who or identity()).to_json()}
        self.say(wire.text_frame(Kind.WELCOME, content, session=self.session))

    def read_call(self) -> tuple[Header, torch.Tensor]:
        header = wire.unpack(self.receive(wire.HEADER_SIZE))
        rows = torch.frombuffer(bytearray(self.receive(header.payload)), dtype=torch.bfloat16)
        return header, rows.view(header.rows, header.width)

    @staticmethod
    def reply(header: Header, rows: torch.Tensor, /, **changes: object) -> bytes:
        """The right reply to a call, or one with ``changes`` in its header."""
        payload = reference(header.layer, rows).view(torch.uint8).numpy().tobytes()
        check = wire.payload_check(payload)
        right = header._replace(kind=Kind.REPLY, dtype=DType.BFLOAT16, payload=len(payload), check=check)
        return right._replace(**changes).pack() + payload  # type: ignore[arg-type]

    def serve(self) -> None:
        """Answer calls as a server should."""
        while True:
            self.say(self.reply(*self.read_call()))

    def wait_until_closed(self) -> None:
        while self.socket.recv(1 << 16):
            pass


#: ``filter(offset, data) -> data``: what goes on of ``data``, which is at ``offset`` of the stream.
Filter = Callable[[int, bytes], bytes]


class Cut(Exception):
    """Raised by a filter: ``last`` still goes on, then the line is cut."""

    def __init__(self, last: bytes) -> None:
        super().__init__()
        self.last = last


def unchanged(offset: int, data: bytes) -> bytes:
    return data


def cut(place: int) -> Filter:
    """Lets ``place`` bytes through, then cuts the line."""

    def filter_(offset: int, data: bytes) -> bytes:
        if offset + len(data) >= place:
            raise Cut(data[: max(0, place - offset)])
        return data

    return filter_


def swallow(place: int) -> Filter:
    """Lets ``place`` bytes through, then nothing, with the line open."""
    return lambda offset, data: data[: max(0, place - offset)]


def flip(place: int) -> Filter:
    """Turns over one bit of the byte at ``place``."""

    def filter_(offset: int, data: bytes) -> bytes:
        at = place - offset
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return filter_


class Damage:
    """A filter that garbles a byte here and there, the same ones for the same ``seed``.

    Places are up to ``2 * spread`` bytes from one another. From one to all of the byte's bits are turned over. ``hits``
    are the places in the stream.
    """

    def __init__(self, seed: int, spread: int) -> None:
        self.hits: list[int] = []
        self._dice = random.Random(seed)
        self._spread = spread
        self._next = self._dice.randrange(2 * spread)

    def __call__(self, offset: int, data: bytes) -> bytes:
        garbled = bytearray(data)
        while self._next < offset + len(data):
            garbled[self._next - offset] ^= self._dice.randint(1, 255)
            self.hits.append(self._next)
            self._next += 1 + self._dice.randrange(2 * self._spread)
        return bytes(garbled)


def receive_with_files(sock: socket.socket) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return sock.recv(1 << 16), []
    return socket.recv_fds(sock, 1 << 16, 4)[:2]


class Proxy(Accepting):
    """A network between a client and the server at ``target``; files that come along are passed on.

    The n-th connection passes what the server sends through the n-th of ``replies``, and what the client sends
    through the n-th of ``requests``; later connections are left alone.
    """

    def __init__(
        self, endpoint: Endpoint, target: Endpoint, replies: tuple[Filter, ...] = (), requests: tuple[Filter, ...] = ()
    ) -> None:
        super().__init__(endpoint)
        self._target = target
        self._replies, self._requests = replies, requests

    def handle(self, number: int, sock: socket.socket) -> None:
        server = socket.socket(self._target.family)
        self.track(server)
        server.settimeout(SOON)
        server.connect(self._target.address)
        set_options(server)
        self.run(self._pump, sock, server, self._requests[number] if number < len(self._requests) else unchanged)
        self._pump(server, sock, self._replies[number] if number < len(self._replies) else unchanged)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, filter_: Filter) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while True:
                data, fds = receive_with_files(source)
                try:
                    if not data:
                        break
                    passed = filter_(offset, data)
                    if fds:
                        passed = passed[socket.send_fds(sink, [passed], fds) :]
                    sink.sendall(passed)
                except Cut as cut_:
                    sink.sendall(cut_.last)
                    break
                finally:
                    for fd in fds:
                        os.close(fd)
                offset += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
