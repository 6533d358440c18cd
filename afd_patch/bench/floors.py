"""The two floors under a hand-off: a blocking socket echo, and shared memory with active waiting.

Both move the bytes of the rows out and back between two processes, in plain Python without headers, checks or
limits. What a connector adds to them is its own.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable

from afd_patch.bench.report import core_set

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 8 << 20
#: Places in the shared memory: number of the call, number of the answer, length; then the request, then the answer.
_CALL, _ANSWER, _SIZE, _START = 0, 64, 128, 4096
#: Calls are numbered 1..200; this says to sleep until the next measurement.
_REST = 0
#: Below this size, joining head and payload costs less than a second system call.
_ONE_PIECE = 64 << 10


def connected(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of a Unix or TCP connection, as a careful user would set them up."""
    if kind == "unix":
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            ends = (client, listener.accept()[0])
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return ends


def echo(sock: socket.socket, cores: str, limit: int) -> None:
    """The other process of ``socket_floor``; ends when the connection does."""
    os.sched_setaffinity(0, core_set(cores))
    buffer = memoryview(bytearray(limit))
    head = memoryview(bytearray(_LENGTH.size))
    while _fill(sock, head):
        (size,) = _LENGTH.unpack(head)
        if not _fill(sock, buffer[:size]):
            return
        sock.sendall(buffer[:size])


def socket_floor(sock: socket.socket, size: int) -> Callable[[], None]:
    """A function that sends ``size`` bytes to ``echo`` and receives them back, blocking."""
    payload = os.urandom(size)
    head = _LENGTH.pack(size)
    landing = memoryview(bytearray(size))

    def call() -> None:
        if size < _ONE_PIECE:
            sock.sendall(head + payload)
        else:
            sock.sendall(head)
            sock.sendall(payload)
        if not _fill(sock, landing):
            raise ConnectionError("the echo process ended")

    return call


def _fill(sock: socket.socket, view: memoryview) -> bool:
    while view:
        received = sock.recv_into(view)
        if received == 0:
            return False
        view = view[received:]
    return True


class SharedFloor:
    """Shared memory between this process and a fork of it that runs ``mirror``; for up to ``limit`` bytes.

    ``mirror`` is awake, and takes its core, only between ``wake`` and ``rest``.
    """

    def __init__(self, limit: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, _START + 2 * limit))
        self._limit = limit
        self._number = 1
        self._ours, self._theirs = socket.socketpair()

    def call(self, size: int) -> Callable[[], None]:
        """A function that puts ``size`` bytes in and takes the answer out."""
        memory, start, answer = self._memory, _START, _START + self._limit
        payload = os.urandom(size)
        landing = memoryview(bytearray(size))

        def call() -> None:
            memory[start : start + size] = payload
            _LENGTH.pack_into(memory, _SIZE, size)
            self._number = self._number % 200 + 1
            memory[_CALL] = number = self._number
            while memory[_ANSWER] != number:
                pass
            landing[:] = memory[answer : answer + size]

        return call

    def wake(self) -> None:
        self._memory[_CALL] = self._number
        self._ours.send(b"w")
        self._ours.recv(1)

    def rest(self) -> None:
        self._memory[_CALL] = _REST

    def end(self) -> None:
        self.rest()
        self._ours.close()

    def mirror(self, cores: str) -> None:
        """The other process."""
        os.sched_setaffinity(0, core_set(cores))
        self._ours.close()
        memory, start, answer = self._memory, _START, _START + self._limit
        buffer = memoryview(bytearray(self._limit))
        while self._theirs.recv(1):
            last = memory[_CALL]
            self._theirs.send(b"w")
            while (number := memory[_CALL]) != _REST:
                if number != last:
                    last = number
                    (size,) = _LENGTH.unpack_from(memory, _SIZE)
                    buffer[:size] = memory[start : start + size]
                    memory[answer : answer + size] = buffer[:size]
                    memory[_ANSWER] = number
