"""Which bytes of a file the kernel has read: its pages in the page cache, after it was emptied of them.

Reads through ``mmap``, as safetensors does them, appear in no counter of the process; pages in the cache are what was
really fetched, read-ahead included.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget these files; it keeps what is dirty, mapped, or on a file system in memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached(paths: Iterable[Path]) -> int:
    """Bytes of these files in the page cache, in whole pages."""
    return sum(_cached(path) for path in paths)


def _cached(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
        pages = -(-size // mmap.PAGESIZE)
        resident = ctypes.create_string_buffer(pages)
        place = ctypes.c_char.from_buffer(mapping)  # writable because the mapping is private; nothing is written
        try:
            if _libc.mincore(ctypes.addressof(place), size, resident) != 0:
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        finally:
            del place
    return sum(byte & 1 for byte in resident.raw) * mmap.PAGESIZE
