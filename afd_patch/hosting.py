"""What processes of this project ask of the machine: to end with their parent, a port, to take memory back."""

from __future__ import annotations

import ctypes
import signal
import socket

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """From now on, when the thread that made this process ends, the kernel sends it the signal ``number``.

    It says nothing about a parent that has ended before (see ``prctl(2)``, ``PR_SET_PDEATHSIG``).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def give_back_memory() -> None:
    """Return what was freed and is still the allocator's; loading a model leaves copies of weights there.

    Only where the C library can do that (``malloc_trim(3)``, glibc).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
