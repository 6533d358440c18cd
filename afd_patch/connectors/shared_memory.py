"""Shared memory for one connection between processes of one host.

The attention side creates an anonymous file (``memfd_create``), seals its size and passes it over the Unix socket. It
has no name, so nothing can be left behind: the kernel frees it with the last process that holds it. The first half
carries requests, the second half replies. Every reconnect makes a new one, so a late writer can never reach a buffer
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
    """The file behind ``fd``, as ``requests`` ``[max_rows, hidden]`` and ``replies`` of the same shape.

    Both are views that live as long as this object; what is in their first rows is valid until the next call.
    """

    def __init__(self, fd: int, identity: Identity) -> None:
        area = area_bytes(identity)
        content = torch.frombuffer(mmap.mmap(fd, 2 * area), dtype=torch.uint8)
        shape = (identity.max_rows, identity.hidden_size)

        def view(start: int, dtype: torch.dtype) -> torch.Tensor:
            return content[start : start + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)

        self.requests = view(0, getattr(torch, identity.dtype))
        self.replies = view(area, getattr(torch, identity.reply_dtype))


def area_bytes(identity: Identity) -> int:
    """Bytes of one area, in whole pages: room for the largest request, and for the largest reply."""
    itemsize: int = max(getattr(torch, name).itemsize for name in (identity.dtype, identity.reply_dtype))
    pages = -(-identity.max_rows * identity.hidden_size * itemsize // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


def create(identity: Identity) -> int:
    """A file descriptor of the size that ``identity`` needs, which cannot change any more."""
    area = area_bytes(identity)
    fd = os.memfd_create("afd_patch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * area)
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
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != 2 * area_bytes(identity):
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
