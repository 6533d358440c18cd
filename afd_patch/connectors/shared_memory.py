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

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRows:
    """Two areas of ``area`` bytes each, seen as tensors."""

    def __init__(self, fd: int, area: int) -> None:
        self.area = area
        self._map = mmap.mmap(fd, 2 * area)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def request(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The request area as ``[rows, width]``; a view, valid until the next call."""
        return self._view(0, rows, width, dtype)

    def reply(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The reply area as ``[rows, width]``; a view, valid until the next call."""
        return self._view(self.area, rows, width, dtype)

    def _view(self, start: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        size = rows * width * dtype.itemsize
        return self._bytes[start : start + size].view(dtype).view(rows, width)


def area_bytes(identity: Identity) -> int:
    """Bytes of one area, in whole pages: room for the largest request, and for the largest reply."""
    itemsize = max(getattr(torch, name).itemsize for name in (identity.dtype, identity.reply_dtype))
    return -(-identity.max_rows * identity.hidden_size * itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def create(area: int) -> int:
    """A file descriptor of ``2 * area`` bytes whose size cannot change any more."""
    fd = os.memfd_create("afd_patch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * area)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(fd: int, area: int) -> None:
    """Raise ``ProtocolError`` unless ``fd`` is safe to map: a peer that shrinks it would kill us with SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the shared memory that the peer sent is no sealed memory file") from None
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != 2 * area:
        raise ProtocolError("the shared memory that the peer sent is not sealed or has the wrong size")


def send_with_fd(sock: socket.socket, data: bytes, fd: int) -> None:
    """Send ``data`` and ``fd`` together; ``data`` is small enough for an empty socket buffer."""
    sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    if sent != len(data):
        raise ProtocolError("the handshake did not fit into the socket buffer")
