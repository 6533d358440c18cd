"""What a patch is: data, and the two ways to make what goes into a slot.

This file knows the shape of a patch and wrapt's wrapper. It does not know how or when a patch is applied.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from afd_patch.errors import PatchError

Make = Callable[[Any], Any]
Live = Callable[[], bool]
Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_NAME = r"[^\W\d]\w*"
_TARGET = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<path>{_NAME}(?:\.{_NAME})*)")


class PatchState(enum.Enum):
    """Where a patch stands; only ``APPLIED`` means that it is in effect."""

    REGISTERED = "registered"
    """Known, never applied."""
    PENDING = "pending"
    """Armed: it is applied when its module is imported."""
    APPLIED = "applied"
    """In effect (possibly beneath somebody else's wrapper, which the detail then names)."""
    LOST = "lost"
    """It was applied, but its slot was overwritten or its module reloaded."""
    ABSENT = "absent"
    """An optional patch whose target does not exist here."""
    FAILED = "failed"
    """It could not be applied; nothing of it was left behind."""
    CONFLICT = "conflict"
    """Restored as far as possible: somebody else's object holds the slot."""
    RESTORED = "restored"
    """Taken back, or cancelled before its module was imported."""


@dataclass(frozen=True)
class Patch:
    """One change to one slot.

    ``target`` is ``"pkg.module:attr"`` or ``"pkg.module:Class.attr"`` (nested classes too).
    ``make(original)`` returns what goes into the slot and should return a fresh object; ``original`` is what
    the module's or class's ``__dict__`` holds, so for a classmethod it is the ``classmethod`` object.
    ``params`` are parameter names that the original must have. An ``optional`` patch may find no target, and
    then the barrier without names does not ask for it. With ``copies`` (the default), by-name copies of the
    original elsewhere are patched too; without, only this one slot is.
    """

    name: str
    target: str
    make: Make
    why: str
    params: tuple[str, ...] = ()
    upstream: str = ""
    removal: str = ""
    optional: bool = False
    copies: bool = True

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise PatchError(
                f"patch {self.name!r}: {self.target!r} is no target; "
                f"write 'pkg.module:attr' or 'pkg.module:Class.attr'."
            )
        if isinstance(self.params, str):
            raise PatchError(f"patch {self.name!r}: params is the string {self.params!r}; write a tuple of names.")

    @property
    def module(self) -> str:
        """The name of the module in which the target lives."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The names that lead from the module to the slot."""
        return tuple(self.target.partition(":")[2].split("."))

    def __str__(self) -> str:
        return f"patch {self.name!r} on {self.target}"


@dataclass(frozen=True)
class PatchStatus:
    """What ``PatchManager.status`` says about one patch."""

    name: str
    target: str
    state: PatchState
    detail: str
    why: str
    upstream: str
    removal: str


class Switch:
    """Says whether a patch is in effect; replacements read it on every call, from any thread."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def __call__(self) -> bool:
        return self.on


class Switched:
    """A ``make`` whose replacements read a switch, and so go inert wherever they are still referenced."""

    def __init__(self, build: Callable[[Any, Live], Any]) -> None:
        self.build = build

    def __call__(self, original: Any) -> Any:
        """Makes a replacement that is always on (for tests of a wrapper without a manager)."""
        return self.build(original, lambda: True)


def switched(build: Callable[[Any, Live], Any]) -> Switched:
    """Makes a ``make`` of ``build(original, live)``; the replacement asks ``live()`` on every call.

    For replacements that are no wrapt wrappers and still should go inert after restore. In code that
    torch.compile traces, the answer is baked into the graph at the first compile.
    """
    return Switched(build)


def host(wrapper: Wrapper) -> Switched:
    """Makes a ``make`` for a host patch: ``wrapper(wrapped, instance, args, kwargs)``, as in wrapt.

    For functions, methods, constructors, class- and staticmethods, and getters of properties that run
    eagerly. Not for anything that torch.compile traces (it drops the wrapper) or that is pickled.
    """

    def build(original: Any, live: Live) -> Any:
        if isinstance(original, property):
            if original.fget is None:
                raise PatchError("the property has no getter that a host patch could wrap.")
            return original.getter(wrapt.FunctionWrapper(original.fget, wrapper, enabled=live))
        if not callable(original) and not isinstance(original, (classmethod, staticmethod)):
            raise PatchError(f"a host patch wraps something that is called, not a {type(original).__qualname__}.")
        return wrapt.FunctionWrapper(original, wrapper, enabled=live)

    return Switched(build)
