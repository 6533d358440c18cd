"""Shared memory for one connection between processes of one host.

The attention side creates an anonymous file (``memfd_create``), seals its size and passes it over the Unix socket. It
has no name, so nothing can be left behind: the kernel frees it with the last process that holds it. Its first area
carries requests, the second one replies. Every reconnect makes a new one, so a late writer can never reach a buffer
that is in use again.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket

import torch

from afd_patch.errors import ProtocolError
from afd_patch.identity import Identity

_INT = array.array("i").itemsize
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRows:
    """The file behind ``fd``, as ``requests`` ``[max_rows, request_columns]`` and ``replies`` likewise.

    Both are views that live as long as this object; what is in their first rows is valid until the next call.
    """

    def __init__(self, fd: int, identity: Identity) -> None:
        content = torch.frombuffer(mmap.mmap(fd, file_bytes(identity)), dtype=torch.uint8)
        dtype: torch.dtype = getattr(torch, identity.dtype)

        def view(start: int, columns: int) -> torch.Tensor:
            end = start + identity.max_rows * columns * dtype.itemsize
            return content[start:end].view(dtype).view(identity.max_rows, columns)

        self.requests = view(0, identity.request_columns)
        self.replies = view(_request_bytes(identity), identity.reply_columns)


def file_bytes(identity: Identity) -> int:
    """Bytes of the file: room for the largest request, and for the largest reply."""
    return _request_bytes(identity) + _whole_pages(identity, identity.reply_columns)


def _request_bytes(identity: Identity) -> int:
    return _whole_pages(identity, identity.request_columns)


def _whole_pages(identity: Identity, columns: int) -> int:
    itemsize: int = getattr(torch, identity.dtype).itemsize
    pages = -(-identity.max_rows * columns * itemsize // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


def create(identity: Identity) -> int:
    """A file descriptor of the size that ``identity`` needs, which cannot change any more."""
    fd = os.memfd_create("afd_patch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, file_bytes(identity))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(fd: int, identity: Identity) -> None:
    """Raise ``ProtocolError`` unless ``fd`` is safe to map: a peer that shrinks it would kill us with SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the shared memory that the peer sent is no sealed memory file") from None
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != file_bytes(identity):
        raise ProtocolError("the shared memory that the peer sent is not sealed or has the wrong size")


def send_with_fd(sock: socket.socket, data: bytes, fd: int) -> None:
    """Send ``data`` and ``fd`` together; ``data`` is small enough for an empty socket buffer."""
    sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    if sent != len(data):
        raise ProtocolError("the handshake did not fit into the socket buffer")


def receive_with_fds(sock: socket.socket, buffer: memoryview, fds: list[int]) -> int:
    """Like ``recv_into``; adds the file descriptors that came along to ``fds``.

    Raises ``ProtocolError`` when there is more than one in all: a peer must not be able to use up ours.
    """
    data, ancillary, flags, _ = sock.recvmsg(len(buffer), socket.CMSG_SPACE(2 * _INT), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", content[: len(content) - len(content) % _INT]))
    if len(fds) > 1 or flags & socket.MSG_CTRUNC:
        raise ProtocolError("the peer sent more files than the one for the shared memory")
    buffer[: len(data)] = data
    return len(data)
