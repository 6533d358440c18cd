"""Reading from memory-mapped weight files no more than what a role owns.

When a page of a mapped file is missing, the kernel fetches its surroundings too, up to megabytes of them, and around
the tensors of one role are those of the other. So every tensor is asked for by itself, just before it is read: then no
page of it is missing. All of this is advice to the kernel; without it the weights are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from afd_patch.identity import read_header

#: How much is asked for at once: the kernel cuts a longer request off at its read-ahead window, and this is the
#: usual one.
_CHUNK = 128 << 10


class TensorFiles:
    """The tensors in the safetensors files at ``paths``, whose headers are read, and no more."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._places: dict[str, tuple[str, int, int]] = {}
        for path in paths:
            start, header = read_header(Path(path))
            _fetch(path, 0, start)
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self._places[name] = (path, start + begin, start + end)

    def fetch(self, name: str) -> None:
        """Have the tensor ``name`` in memory, or on its way; unknown names are none of our business."""
        if name in self._places:
            _fetch(*self._places[name])


def _fetch(path: str, begin: int, end: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        for place in range(begin, end, _CHUNK):
            os.posix_fadvise(fd, place, min(_CHUNK, end - place), os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)
