"""Slots: one name in the dictionary of one module or class, read and written without running foreign code.

Everything here goes through the dictionaries themselves. ``getattr`` would load lazy modules, bind methods
and ask metaclasses; ``vars(module)`` would load ``importlib.util``'s lazy modules too. What a foreign wrapper
hides, and who made it, is looked up here as well; that does read foreign objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import wrapt

from afd_patch.errors import PatchError
from afd_patch.patch_manager.patch import Patch

_MODULE_DICT: Final[Any] = vars(ModuleType)["__dict__"]
_CLASS_DICT: Final[Any] = vars(type)["__dict__"]
_CLASS_MRO: Final[Any] = vars(type)["__mro__"]
_CLASS_QUALNAME: Final[Any] = vars(type)["__qualname__"]


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()


def is_module(value: object) -> bool:
    """True for real module objects; ``isinstance`` would ask a lazy object for its ``__class__``."""
    return issubclass(type(value), ModuleType)


def is_class(value: object) -> bool:
    """True for classes, whatever their metaclass says."""
    return issubclass(type(value), type)


def module_dict(module: Any) -> dict[str, Any]:
    """The dictionary of a module, without loading a lazy one."""
    namespace: dict[str, Any] = _MODULE_DICT.__get__(module)
    return namespace


def class_dict(cls: Any) -> Mapping[str, Any]:
    """The own dictionary of a class, past its metaclass."""
    namespace: Mapping[str, Any] = _CLASS_DICT.__get__(cls)
    return namespace


def class_mro(cls: Any) -> tuple[type, ...]:
    """The method resolution order of a class, past its metaclass."""
    mro: tuple[type, ...] = _CLASS_MRO.__get__(cls)
    return mro


class Slot:
    """One name in one module or class."""

    __slots__ = ("attr", "owner")

    def __init__(self, owner: Any, attr: str) -> None:
        self.owner = owner
        self.attr = attr

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the slot while its owner is alive."""
        return id(self.owner), self.attr

    def __str__(self) -> str:
        if is_module(self.owner):
            return f"{module_dict(self.owner).get('__name__')}.{self.attr}"
        return f"{class_dict(self.owner).get('__module__')}.{_CLASS_QUALNAME.__get__(self.owner)}.{self.attr}"

    def read(self) -> Any:
        """What the owner's own dictionary holds, or ``MISSING``."""
        namespace = module_dict(self.owner) if is_module(self.owner) else class_dict(self.owner)
        return namespace.get(self.attr, MISSING)

    def inherited(self) -> Any:
        """What a look-up finds in the base classes of the owner, or ``MISSING``."""
        if is_class(self.owner):
            for base in class_mro(self.owner)[1:]:
                if self.attr in class_dict(base):
                    return class_dict(base)[self.attr]
        return MISSING

    def write(self, value: Any) -> None:
        """Puts ``value`` into the slot; an existing slot keeps its place in the dictionary's order."""
        if is_module(self.owner):
            module_dict(self.owner)[self.attr] = value
        else:
            type.__setattr__(self.owner, self.attr, value)

    def delete(self) -> None:
        """Removes the slot from the owner's own dictionary."""
        if is_module(self.owner):
            del module_dict(self.owner)[self.attr]
        else:
            type.__delattr__(self.owner, self.attr)


def resolve(patch: Patch, module: Any) -> Slot:
    """Finds the slot of a patch in its module; the slot itself may be inherited or missing.

    Raises ``PatchError`` when the way to the slot does not lead through classes.
    """
    if not is_module(module):
        raise PatchError(
            f"{patch}: sys.modules holds a {type(module).__qualname__} under {patch.module!r}, which is no "
            f"module; name the module that really defines the target."
        )
    owner: Any = module
    for name in patch.path[:-1]:
        step = Slot(owner, name)
        found = step.read()
        if found is MISSING:
            found = step.inherited()
        if found is MISSING:
            raise MissingTargetError(patch, name)
        if not is_class(found):
            raise PatchError(
                f"{patch}: {name!r} is a {type(found).__qualname__}, not a class; "
                f"a target leads through modules and classes only."
            )
        owner = found
    return Slot(owner, patch.path[-1])


class MissingTargetError(PatchError):
    """The target does not exist in the module that was found."""

    def __init__(self, patch: Patch, name: str) -> None:
        super().__init__(
            f"{patch}: {patch.module} defines no {name!r} (names that a module serves through __getattr__ do "
            f"not count); this version is not the one that the patch was written for: adapt the target, or "
            f"name the module that defines it."
        )


def check_params(patch: Patch, original: Any) -> None:
    """Raises ``PatchError`` unless the original has all parameters that the patch relies on."""
    if not patch.params:
        return
    function = original
    if isinstance(original, (classmethod, staticmethod)):
        function = original.__func__
    elif isinstance(original, property):
        function = original.fget
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise PatchError(
            f"{patch}: the signature of the original cannot be read ({error}), so its parameters "
            f"{', '.join(patch.params)} cannot be checked; drop params or choose another target."
        ) from error
    missing = [name for name in patch.params if name not in known]
    if missing:
        raise PatchError(
            f"{patch}: the original has no parameter {', '.join(map(repr, missing))} (it has: "
            f"{', '.join(known) or 'none'}); use a version that has them, or adapt the patch."
        )


def holds(value: Any, ours: Any) -> bool:
    """Whether ``value`` is ``ours`` or wraps it in a way that can be seen."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        if item is ours:
            return True
        if id(item) not in seen:
            seen[id(item)] = item
            todo.extend(_beneath(item))
    return False


def _beneath(item: Any) -> Iterator[Any]:
    if issubclass(type(item), wrapt.BaseObjectProxy):
        yield item.__wrapped__
    elif isinstance(item, (MethodType, classmethod, staticmethod)):
        yield item.__func__
    elif isinstance(item, property):
        yield item.fget
    elif isinstance(item, functools.partial):
        yield item.func
    elif is_class(item):
        yield from class_mro(item)[1:]
    elif callable(item):
        yield inspect.getattr_static(item, "__wrapped__", None)
        if isinstance(item, FunctionType):
            for cell in item.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:  # a cell that is not filled yet holds nothing
                    continue


def describe(value: Any) -> str:
    """Names who put ``value`` where it was found: where its code comes from, not what it pretends to be."""
    if value is MISSING:
        return "nothing (somebody deleted it)"
    if issubclass(type(value), wrapt.FunctionWrapper):
        return describe(value._self_wrapper)
    if isinstance(value, (MethodType, classmethod, staticmethod)):
        return describe(value.__func__)
    if isinstance(value, property):
        return describe(value.fget)
    if isinstance(value, functools.partial):
        return describe(value.func)
    if isinstance(value, FunctionType):
        # functools.wraps copies __module__ and __qualname__; globals and code do not lie.
        qualname = getattr(value.__code__, "co_qualname", value.__qualname__)
        return f"{value.__globals__.get('__name__')}.{qualname}"
    if is_class(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"an object of class {type(value).__module__}.{type(value).__qualname__}"
