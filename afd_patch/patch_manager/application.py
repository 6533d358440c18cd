"""One patch in effect: what was in the slot, what is there now, which copies were changed, and the way back.

This file writes slots; it never runs the patch's own code, so its functions may run under the manager's lock.
``prepare`` is the exception: it runs ``make`` and reads signatures, and must run outside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from afd_patch.errors import PatchError
from afd_patch.patch_manager import copies
from afd_patch.patch_manager.patch import Patch, Switch, Switched
from afd_patch.patch_manager.slots import (
    MISSING,
    MissingTargetError,
    Slot,
    check_params,
    holds,
    module_dict,
    resolve,
)


class Application:
    """The record of one patch in one slot."""

    def __init__(self, patch: Patch, module: Any, slot: Slot, original: Any) -> None:
        self.patch = patch
        self.module = module
        self.spec = module_dict(module).get("__spec__")  # a reload gives the module another one
        self.slot = slot
        self.original = original
        self.created = slot.read() is MISSING  # then the slot is ours, and the original is inherited
        self.switch = Switch()
        self.replacement = self._make()
        self.attached = False  # ours is in place already, beneath somebody else's wrapper from last time
        self.copies: list[Slot] = []
        self.homes: set[tuple[int, str]] = set()  # where the replacement lived before

    def _make(self) -> Any:
        make = self.patch.make
        try:
            made = make.build(self.original, self.switch) if isinstance(make, Switched) else make(self.original)
        except Exception as error:  # whatever a patch's own code raises is reported as a patch that failed
            raise PatchError(f"{self.patch}: make failed with {type(error).__name__}: {error}") from error
        if made is self.original:
            raise PatchError(f"{self.patch}: make returned the original, which changes nothing; return a replacement.")
        return made

    @property
    def can_go_inert(self) -> bool:
        """Whether references that cannot be swept stop having an effect after restore."""
        return isinstance(self.patch.make, Switched)

    def is_fresh(self) -> bool:
        """Whether the slot still holds what the replacement was made of."""
        if self.attached:
            return True
        current = self.slot.read()
        if self.created:
            return current is MISSING and self.slot.inherited() is self.original
        return current is self.original

    def in_effect(self) -> bool:
        """Whether a look-up of the target finds ours, if beneath somebody else's wrapper.

        Reads foreign wrappers, so not under the lock.
        """
        if sys.modules.get(self.patch.module) is not self.module:
            return False
        try:
            slot = resolve(self.patch, self.module)
        except PatchError:
            return False
        return slot.key == self.slot.key and holds(slot.read(), self.replacement)

    def current(self) -> Any:
        """What a look-up of the target in its module finds now, or ``MISSING``."""
        try:
            return resolve(self.patch, sys.modules.get(self.patch.module)).read()
        except PatchError:
            return MISSING

    def was_reloaded(self) -> bool:
        """Whether the module was executed again since, so that what is in the slot is native."""
        return module_dict(self.module).get("__spec__") is not self.spec

    def put_in(self) -> None:
        """Writes the replacement into the slot. Raises ``PatchError`` if the owner cannot be changed."""
        if not self.attached:
            self._write(self.slot)

    def put_into_copy(self, copy: Slot) -> None:
        """Writes the replacement into a by-name copy and remembers it."""
        self._write(copy)
        self.copies.append(copy)

    def _write(self, slot: Slot) -> None:
        try:
            slot.write(self.replacement)
        except (AttributeError, TypeError) as error:
            raise PatchError(
                f"{self.patch}: {slot} cannot be changed ({error}); choose a target in a module or class "
                f"written in Python, or copies=False if this is only a copy."
            ) from error

    def take_out(self) -> Any:
        """Gives slot and known copies the original back, where they still hold ours.

        Returns what is in the slot's way: somebody else's object, ``MISSING`` for a deleted slot, or ``None``
        when the slot is as it was.
        """
        for copy in self.copies:
            if copy.read() is self.replacement:
                copy.write(self.original)
        self.copies.clear()
        current = self.slot.read()
        if current is self.replacement:
            if self.created:
                self.slot.delete()
            else:
                self.slot.write(self.original)
            return None
        if current is (MISSING if self.created else self.original):
            return None
        return current

    def owns_copy(self, slot: Slot) -> bool:
        """Whether ours in ``slot`` was copied from the patched slot, and is not where ours came from.

        A fresh replacement can only come from the slot. One that had a home before (a class in a module) may
        also be imported from there; then the name tells, because ``from m import f`` binds ``f``.
        """
        return slot.key not in self.homes and (not self.homes or slot.attr == self.patch.path[-1])


def prepare(patch: Patch, module: Any, previous: Application | None) -> Application | None:
    """Checks the target and makes its replacement; changes nothing. None: an optional target is absent.

    ``previous`` is the record of this patch from before a restore that met a conflict: if it still sits
    beneath the foreign wrapper, it is used again instead of being put on top a second time.

    Raises ``PatchError`` for a missing target, missing parameters, and whatever ``make`` raises.
    """
    if previous is not None and previous.in_effect():
        previous.attached = True
        return previous
    try:
        slot = resolve(patch, module)
        original = slot.read()
        if original is MISSING:
            original = slot.inherited()
        if original is MISSING:
            raise MissingTargetError(patch, patch.path[-1])
    except MissingTargetError:
        if patch.optional:
            return None
        raise
    if original is object.__new__ or original is object.__init__:
        # object's own constructors refuse arguments once a class has either of them, and CPython does not
        # forget a __new__ that was deleted again: neither the call nor the restore would be exact.
        raise PatchError(
            f"{patch}: the class only has object's {patch.path[-1]}; choose the constructor that really runs."
        )
    check_params(patch, original)
    return Application(patch, module, slot, original)


def put_in(applications: Sequence[Application], others: Sequence[Application]) -> None:
    """Puts replacements into slots and copies, then switches them on: all, or none and ``PatchError``."""
    taken = {other.slot.key: other.patch for other in others}
    _note_homes(applications, [application.slot for application in (*applications, *others)])
    with ExitStack() as undo:
        for application in applications:
            key = application.slot.key
            if taken.setdefault(key, application.patch) is not application.patch:
                raise PatchError(
                    f"{application.patch}: {taken[key]} reaches the same slot by another name; one slot has "
                    f"one patch: merge the two."
                )
            undo.callback(application.take_out)
            application.put_in()
        _sweep_in(applications, set(taken))
        undo.pop_all()
    for application in applications:
        application.switch.on = True


def _note_homes(applications: Sequence[Application], slots: Sequence[Slot]) -> None:
    """Remembers replacements that are native content of another slot, before that is overwritten."""
    for application in applications:
        others = (slot for slot in slots if slot is not application.slot)
        application.homes = {slot.key for slot in others if slot.read() is application.replacement}


def _sweep_in(applications: Sequence[Application], slots: set[tuple[int, str]]) -> None:
    """Patches the by-name copies of the originals, except those that are targets themselves."""
    originals: dict[int, Application] = {}
    replacements: dict[int, Application] = {}
    for application in applications:
        if copies.can_be_swept(application.replacement):
            replacements[id(application.replacement)] = application
        # An inherited original stays what it is for everybody else.
        if application.patch.copies and not application.created and copies.can_be_swept(application.original):
            originals.setdefault(id(application.original), application)
    values = [a.original for a in originals.values()] + [a.replacement for a in replacements.values()]
    for slot, value in copies.find(values):
        if slot.key in slots:
            continue
        if id(value) in replacements:
            replacements[id(value)].homes.add(slot.key)
        if id(value) in originals and slot.read() is value:
            originals[id(value)].put_into_copy(slot)


def sweep_out(applications: Sequence[Application]) -> None:
    """Gives back copies that were taken while the patches were on."""
    ours = {id(a.replacement): a for a in applications if copies.can_be_swept(a.replacement)}
    for slot, value in copies.find([application.replacement for application in ours.values()]):
        application = ours[id(value)]
        if not application.owns_copy(slot):
            continue
        original, passed = application.original, {id(value)}
        while id(original) in ours and id(original) not in passed:  # patches on top of each other, all out now
            passed.add(id(original))
            original = ours[id(original)].original
        if slot.read() is value:
            slot.write(original)
