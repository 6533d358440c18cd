"""The patch manager: applies, restores and reports patches to somebody else's modules.

It knows wrapt and Python's import system. It knows neither vLLM nor torch, imports neither, and is itself
only imported by a process in which a role is active. What is patched, and why, is in ``afd_patch.patches``.

    manager = PatchManager()
    manager.register(Patch("greeting", "pkg.module:greet", host(wrapper), why="..."))
    manager.apply()
    manager.require_applied()
    manager.restore()
"""

from __future__ import annotations

from afd_patch.errors import PatchError, PatchNotApplied, RestoreConflict
from afd_patch.patch_manager.manager import PatchManager
from afd_patch.patch_manager.patch import Patch, PatchState, PatchStatus, host, switched

__all__ = [
    "Patch",
    "PatchError",
    "PatchManager",
    "PatchNotApplied",
    "PatchState",
    "PatchStatus",
    "RestoreConflict",
    "host",
    "switched",
]
