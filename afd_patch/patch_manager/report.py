"""Looks at patches and says where they stand; changes nothing.

It reads slots and foreign wrappers, so it runs without the manager's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from afd_patch.errors import PatchNotApplied
from afd_patch.patch_manager.application import Application
from afd_patch.patch_manager.imports import initializing_spec
from afd_patch.patch_manager.patch import Patch, PatchState, PatchStatus
from afd_patch.patch_manager.slots import describe


@dataclass(eq=False)
class Entry:
    """One registered patch and where the manager left it."""

    patch: Patch
    state: PatchState = PatchState.REGISTERED
    detail: str = ""
    application: Application | None = None


def observe(entry: Entry) -> PatchStatus:
    """Where a patch stands now, which may not be where it was left."""
    patch, state, detail, application = entry.patch, entry.state, entry.detail, entry.application
    if state is PatchState.APPLIED and application is not None:
        state, detail = _observe_applied(application)
    elif state is PatchState.PENDING:
        detail = _why_pending(patch)
    elif state is PatchState.REGISTERED:
        detail = "apply() was not called"
    elif state is PatchState.RESTORED:
        detail = "it was taken back"
    return PatchStatus(patch.name, patch.target, state, detail, patch.why, patch.upstream, patch.removal)


def _observe_applied(application: Application) -> tuple[PatchState, str]:
    name = application.patch.module
    if not application.in_effect():
        if application.was_reloaded() or sys.modules.get(name) is not application.module:
            return PatchState.LOST, f"module {name} was reloaded or imported anew"
        return PatchState.LOST, f"the slot was overwritten: it holds {describe(application.current())}"
    current = application.slot.read()
    return PatchState.APPLIED, "" if current is application.replacement else f"beneath {describe(current)}"


def _why_pending(patch: Patch) -> str:
    module = sys.modules.get(patch.module)
    if module is None:
        return f"module {patch.module} has not been imported"
    if initializing_spec(module) is not None:
        return f"module {patch.module} is being imported"
    return f"module {patch.module} was imported past our finder; apply() again patches it"


def require_applied(entries: Mapping[str, Entry], names: Iterable[str] | None) -> None:
    """Raises ``PatchNotApplied`` for patches that are asked for and not in effect."""
    seen = {name: observe(entry) for name, entry in entries.items()}
    if names is None:
        excused = (PatchState.ABSENT, PatchState.PENDING)
        asked = [n for n, status in seen.items() if not (entries[n].patch.optional and status.state in excused)]
    else:
        asked = list(names)
    missing = []
    for name in asked:
        if name not in seen:
            missing.append(f"{name!r} is not registered")
        elif seen[name].state is not PatchState.APPLIED:
            missing.append(f"{name!r} on {seen[name].target} is {seen[name].state.value}: {seen[name].detail}")
    if missing:
        raise PatchNotApplied(
            f"{len(missing)} of {len(asked)} patches are not in effect, so nothing may run: "
            f"{'; '.join(missing)}. Activate the role in this process before these modules are imported, or "
            f"apply() again."
        )
