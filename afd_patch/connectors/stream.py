"""Byte streams between the roles: opening, options, and reads that never wait without a limit."""

from __future__ import annotations

import select
import socket
import time

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.errors import ConnectorError

#: Socket buffers: large enough that one prefill chunk does not bounce between two full buffers.
_BUFFER_BYTES = 4 << 20


def connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """A connected non-blocking stream socket; raises ``OSError`` when nobody answers within ``timeout`` seconds."""
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(endpoint.address)
        prepare(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """Options of a connected socket of either side."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def send_exactly(sock: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """Send all of ``data`` by ``deadline`` (``time.monotonic`` seconds) or raise ``ConnectorError``."""
    view = memoryview(data)
    while view:
        try:
            sent = sock.send(view)
        except BlockingIOError:
            _wait(sock, select.POLLOUT, deadline)
            continue
        except OSError as error:
            raise ConnectorError(f"connection lost while sending: {error}") from error
        view = view[sent:]


def receive_exactly(sock: socket.socket, buffer: memoryview, deadline: float, spin: float = 0.0) -> None:
    """Fill ``buffer`` by ``deadline`` or raise ``ConnectorError``.

    For the first ``spin`` seconds the wait is active, because waking a sleeping core costs more than a small answer.
    """
    spin_until = time.perf_counter() + spin if spin else 0.0
    while buffer:
        try:
            received = sock.recv_into(buffer)
        except BlockingIOError:
            if spin_until and time.perf_counter() < spin_until:
                continue
            _wait(sock, select.POLLIN, deadline)
            continue
        except OSError as error:
            raise ConnectorError(f"connection lost while receiving: {error}") from error
        if received == 0:
            raise ConnectorError("connection closed by the peer")
        buffer = buffer[received:]


def _wait(sock: socket.socket, event: int, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise ConnectorError("no answer within the time limit")
    poll = select.poll()
    poll.register(sock, event)
    if not poll.poll(max(1, int(remaining * 1000))):
        raise ConnectorError("no answer within the time limit")
