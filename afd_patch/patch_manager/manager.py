"""Applies and restores a set of patches. See ``afd_patch.patch_manager`` for how it is used.

How threads are kept apart: what takes time or runs foreign code (``make``, signatures, imports, looking into
foreign wrappers) runs without the lock; slots are written and states changed under it, after a check that
nothing changed in between. No import happens under the lock, because an import in another thread may be
waiting for the lock in our import hook.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

from afd_patch.errors import PatchError, RestoreConflict
from afd_patch.patch_manager.application import Application, prepare, put_in, sweep_out
from afd_patch.patch_manager.imports import PatchingFinder, initializing_spec, when_initialized
from afd_patch.patch_manager.patch import Patch, PatchState, PatchStatus
from afd_patch.patch_manager.report import Entry, observe, require_applied
from afd_patch.patch_manager.slots import describe

# One lock for all managers of a process, so that fork can hold it: a child never inherits half a change.
_LOCK = threading.RLock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)

_Obstacle = tuple[Entry, Application, Any]


class PatchManager:
    """A set of patches that is applied and restored as one."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._order: list[Entry] = []  # entries with an application, in the order of application
        self._finder = PatchingFinder(self._on_import)
        self._watched: dict[str, ModuleSpec] = {}

    def register(self, *patches: Patch) -> None:
        """Adds patches, all or none; ``apply`` puts them into effect.

        Raises ``PatchError`` for a name or a slot that has a patch already, and for a target inside another
        patch's target (``m:C`` and ``m:C.f``), where the result would depend on the order.
        """
        with _LOCK:
            entries = dict(self._entries)
            for patch in patches:
                for other in entries.values():
                    _check_apart(patch, other.patch)
                entries[patch.name] = Entry(patch)
            self._entries = entries

    def apply(self) -> None:
        """Puts all registered patches into effect: now, or when their module is imported.

        Patches in effect stay as they are; lost and failed ones are applied again. On any failure everything
        that this call did is undone, and ``PatchError`` is raised.
        """
        lost = [entry for entry in self._entries.values() if observe(entry).state is PatchState.LOST]
        with _LOCK:
            todo = [e for e in self._entries.values() if e.state is not PatchState.APPLIED or e in lost]
            self._withdraw(lost)
            again = [entry for entry in todo if entry.state is PatchState.PENDING]
            for entry in todo:
                # A conflict keeps its record: ours may still sit beneath the foreign wrapper.
                entry.state, entry.detail = PatchState.PENDING, ""
            names = {entry.patch.module for entry in todo} - {entry.patch.module for entry in again}
            if todo:
                self._finder.armed |= names  # first armed, then looked: no import in between is missed
                self._finder.install()
        with self._all_or_nothing(todo, again, names):
            self._apply_imported(todo)

    def restore(self) -> None:
        """Takes all patches back, exactly, and cancels those still waiting for an import.

        Raises ``RestoreConflict`` after all others were restored, if a slot holds somebody else's object.
        Patches in such slots are inert, and a later ``restore`` tries them again.
        """
        with _LOCK:
            self._disarm(set(self._finder.armed))
            for entry in self._entries.values():
                if entry.state in (PatchState.PENDING, PatchState.FAILED, PatchState.ABSENT):
                    entry.state, entry.detail = PatchState.RESTORED, ""
            obstacles = self._withdraw(self._order)
        conflicts = self._note_conflicts(obstacles)
        if conflicts:
            raise RestoreConflict(" ".join(conflicts))

    @contextmanager
    def applied(self) -> Iterator[PatchManager]:
        """A scope: ``apply`` on entry, ``restore`` on exit, also after an exception. Scopes do not nest."""
        self.apply()
        try:
            yield self
        finally:
            self.restore()

    def status(self) -> list[PatchStatus]:
        """Looks at every slot and says where each patch stands, in the order of registration."""
        return [observe(entry) for entry in self._entries.values()]

    def require_applied(self, names: Iterable[str] | None = None) -> None:
        """The barrier: raises ``PatchNotApplied``, which lists every patch that is not in effect and why.

        ``names`` are the patches that are asked for; None asks for all, except optional ones whose target
        is absent or not imported.
        """
        require_applied(self._entries, names)

    def _apply_imported(self, todo: Sequence[Entry]) -> None:
        """Puts in those patches whose module is there; watches modules whose code is still running."""
        ready: list[tuple[Entry, Any]] = []
        for entry in todo:
            name = entry.patch.module
            module = sys.modules.get(name)
            if module is None:
                continue
            spec = initializing_spec(module)
            if spec is not None and self._watched.get(name) is not spec:
                self._watched[name] = spec
                when_initialized(spec, partial(self._on_initialized, name, module))
            if initializing_spec(module) is None:  # looked at again: the import may have ended meanwhile
                ready.append((entry, module))
        self._put_in(ready)

    def _put_in(self, ready: Sequence[tuple[Entry, Any]]) -> None:
        """Prepares without the lock and puts in under it, until nothing changed in between."""
        rounds = len(ready) + 10
        while ready:
            prepared = [(entry, module, prepare(entry.patch, module, entry.application)) for entry, module in ready]
            with _LOCK:
                fresh: list[tuple[Entry, Application]] = []
                ready = []
                for entry, module, application in prepared:
                    if entry.state is not PatchState.PENDING:
                        continue  # another thread put it in, or restored: that came last, so it counts
                    if application is None:
                        entry.state, entry.detail = PatchState.ABSENT, "its target does not exist here"
                    elif application.is_fresh():
                        fresh.append((entry, application))
                    else:
                        ready.append((entry, module))
                self._commit(fresh)
                for module_name in {entry.patch.module for entry, _, _ in prepared}:
                    self._disarm_if_done(module_name)
            rounds -= 1
            if ready and not rounds:
                raise PatchError(f"{ready[0][0].patch}: its slot changes faster than it can be patched; find who.")

    def _commit(self, fresh: Sequence[tuple[Entry, Application]]) -> None:
        """Under the lock: slots, copies, switches, and only then the states."""
        coming = [entry for entry, _ in fresh]
        others = [e.application for e in self._order if e.application is not None and e not in coming]
        put_in([application for _, application in fresh], others)
        for entry, application in fresh:
            entry.application = application
            entry.state, entry.detail = PatchState.APPLIED, ""
            if not application.attached or entry not in self._order:
                self._order = [other for other in self._order if other is not entry] + [entry]

    @contextmanager
    def _all_or_nothing(self, todo: Sequence[Entry], again: Sequence[Entry], names: set[str]) -> Iterator[None]:
        """Undoes the block if it raises: takes out what it put in for ``todo`` and disarms ``names``.

        What failed is then FAILED; ``again`` was waiting for its import before, and waits on.
        """
        try:
            yield
        except BaseException as error:  # an interrupt must leave nothing half done either; raised again below
            with _LOCK:
                undone = [entry for entry in todo if entry.state is PatchState.APPLIED]
                obstacles = self._withdraw(undone)
                self._disarm(names)
                for entry in todo:
                    if entry not in undone and entry.state is not PatchState.PENDING:
                        continue  # restored meanwhile
                    if entry in again:
                        entry.state = PatchState.PENDING
                        self._finder.armed.add(entry.patch.module)
                    else:
                        entry.state, entry.detail = PatchState.FAILED, str(error) or type(error).__name__
            self._note_conflicts(obstacles)
            raise

    def _on_import(self, name: str) -> None:
        """Called in the import of ``name``, after its code has run; what it raises fails the import."""
        with _LOCK:
            if name not in self._finder.armed:
                return
            waiting = [
                entry
                for entry in self._entries.values()
                if entry.patch.module == name and entry.state in (PatchState.PENDING, PatchState.FAILED)
            ]
            for entry in waiting:
                entry.state = PatchState.PENDING
        # A failure leaves the module armed: who tries the import again gets it patched or not at all.
        with self._all_or_nothing(waiting, again=(), names=set()):
            self._put_in([(entry, sys.modules.get(name)) for entry in waiting])

    def _on_initialized(self, name: str, module: Any) -> None:
        """As ``_on_import``, for a module whose code was running already when it was armed."""
        self._watched.pop(name, None)
        if sys.modules.get(name) is not module:
            return  # its code failed, or it replaced itself
        with ExitStack() as undo:
            undo.callback(sys.modules.pop, name, None)  # what the import system does when a module fails
            self._on_import(name)
            undo.pop_all()

    def _disarm(self, names: set[str]) -> None:
        self._finder.armed -= names
        if not self._finder.armed:
            self._finder.remove()

    def _disarm_if_done(self, name: str) -> None:
        """Stops waiting for a module. The finder stays until restore: idle, and no import sees it vanish."""
        if all(e.state is not PatchState.PENDING for e in self._entries.values() if e.patch.module == name):
            self._finder.armed.discard(name)

    def _withdraw(self, entries: Sequence[Entry]) -> list[_Obstacle]:
        """Under the lock: switches off and takes out, last one first; returns what was in the way."""
        taken = [(entry, entry.application) for entry in reversed(entries) if entry.application is not None]
        for _, application in taken:
            application.switch.on = False
        obstacles = []
        for entry, application in taken:
            obstacle = application.take_out()
            if obstacle is not None:
                obstacles.append((entry, application, obstacle))
            entry.state, entry.detail, entry.application = PatchState.RESTORED, "", None
        self._order = [entry for entry in self._order if entry.application is not None]
        sweep_out([application for _, application in taken])
        return obstacles

    def _note_conflicts(self, obstacles: Sequence[_Obstacle]) -> list[str]:
        """Sorts out what was in the way and remembers it; reads foreign objects, so not under the lock."""
        conflicts = []
        for entry, application, obstacle in reversed(obstacles):
            if application.was_reloaded():
                continue  # native code was put there anew: nothing of ours, nobody else's
            inert = "ours is inert" if application.can_go_inert else "ours, a plain replacement, may still be called"
            conflict = (
                f"{entry.patch}: its slot holds {describe(obstacle)}, put there after ours, so it was left "
                f"alone; {inert}. Let its owner take it back, then restore() again."
            )
            with _LOCK:
                if entry.application is None:
                    entry.state, entry.detail, entry.application = PatchState.CONFLICT, conflict, application
                    self._order.append(entry)
            conflicts.append(conflict)
        return conflicts


def _check_apart(patch: Patch, other: Patch) -> None:
    if patch.name == other.name:
        raise PatchError(f"{patch}: the name is taken by {other}; give it another.")
    if patch.module != other.module:
        return
    length = min(len(patch.path), len(other.path))
    if patch.path == other.path:
        raise PatchError(f"{patch}: {other} has this slot already; one slot has one patch: merge the two.")
    if patch.path[:length] == other.path[:length]:
        raise PatchError(f"{patch}: one of its target and that of {other} is inside the other; patch only one.")
