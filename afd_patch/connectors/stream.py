"""Byte streams between the roles: opening, options, and transfers that never wait without a limit."""

from __future__ import annotations

import math
import socket
import struct
import time
from contextlib import suppress

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.errors import ConnectorError

#: Socket buffers: large enough that one prefill chunk does not bounce between two full buffers.
_BUFFER_BYTES = 4 << 20
#: Microseconds after which a blocked transfer looks at its deadline.
_TICK_US = 50_000
#: Seconds that one attempt to connect may take. The kernel asks a silent host again after ever longer pauses; a new
#: attempt asks at once.
_ATTEMPT = 2.0
#: After so many seconds without traffic the kernel asks whether the other host is there, so many seconds apart and so
#: many times, before it gives the connection up. While data is on its way, deadlines limit what is waited for.
_IDLE, _INTERVAL, _PROBES = 4, 2, 3


def connect(sock: socket.socket, endpoint: Endpoint, timeout: float) -> None:
    """Connect ``sock`` to ``endpoint``; raises ``OSError`` when nobody answers within ``timeout`` seconds, or in 2.

    The socket blocks afterwards, in ticks: a transfer is one system call, as cheap as it gets, and still notices its
    deadline.
    """
    sock.settimeout(min(timeout, _ATTEMPT))
    sock.connect(endpoint.address)
    set_options(sock)
    sock.settimeout(None)
    tick = struct.pack("@ll", 0, _TICK_US)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)


def set_options(sock: socket.socket) -> None:
    """Options of a connected socket of either side."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def send_exactly(sock: socket.socket, deadline: float, *parts: bytes | memoryview) -> None:
    """Send all ``parts`` by ``deadline`` (``time.monotonic`` seconds) or raise ``ConnectorError``."""
    pending = [memoryview(part) for part in parts if len(part)]
    while pending:
        try:
            sent = sock.sendmsg(pending)
        except BlockingIOError:
            check(deadline)
            continue
        except OSError as error:
            raise ConnectorError(f"connection lost while sending: {error}") from error
        while pending and sent >= len(pending[0]):
            sent -= len(pending.pop(0))
        if pending:
            check(deadline)
            pending[0] = pending[0][sent:]


def receive_exactly(
    sock: socket.socket, buffer: memoryview, deadline: float, spin: float = 0.0, rest: float = math.inf
) -> None:
    """Fill ``buffer`` by ``deadline``, and within ``rest`` seconds of its first byte, or raise ``ConnectorError``.

    For the first ``spin`` seconds the wait is active, because waking a sleeping core costs more than a small answer.
    """
    spin_until = time.monotonic() + spin if spin else 0.0
    while buffer:
        try:
            received = sock.recv_into(buffer, 0, socket.MSG_DONTWAIT if spin_until else 0)
        except BlockingIOError:
            if not spin_until:
                check(deadline)
            elif time.monotonic() >= spin_until:
                spin_until = 0.0
            continue
        except OSError as error:
            raise ConnectorError(f"connection lost while receiving: {error}") from error
        if received == 0:
            raise ConnectorError("connection closed by the peer")
        if received == len(buffer):
            return
        buffer = buffer[received:]
        deadline = min(deadline, time.monotonic() + rest)
        check(deadline)


def wait_readable(sock: socket.socket, deadline: float) -> bool:
    """Whether there is something to receive (or to learn) by ``deadline``; takes nothing out of the socket."""
    while True:
        try:
            sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except OSError as error:
            raise ConnectorError(f"connection lost while waiting: {error}") from error
        else:
            return True


def check(deadline: float) -> None:
    """Raise ``ConnectorError`` when ``deadline`` has passed."""
    if time.monotonic() >= deadline:
        raise ConnectorError("no answer within the time limit")


def shut_down(sock: socket.socket) -> None:
    """End both directions, which wakes whoever waits for the socket in another thread; ``close`` does not."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
