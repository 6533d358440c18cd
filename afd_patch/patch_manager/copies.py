"""Finds by-name copies: slots of modules and classes that hold a given object, by identity.

It looks at the globals of every module in ``sys.modules`` and at the own dictionaries of the classes found
there (nested ones too). It never loads a lazy module and only reads. References that live elsewhere (in
containers, closures, default arguments, instances) cannot be found; replacements go inert there by a switch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from afd_patch.patch_manager.slots import Slot, class_dict, is_module, module_dict

_T = TypeVar("_T")
_TRIES = 100


def can_be_swept(value: Any) -> bool:
    """Whether identity means "a copy of this": constants like ``None`` or ``3`` are shared by everybody."""
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))


def find(values: Iterable[Any]) -> list[tuple[Slot, Any]]:
    """All slots that hold one of ``values``, each with the value found in it."""
    wanted = frozenset(id(value) for value in values)
    found: list[tuple[Slot, Any]] = []
    if not wanted:
        return found
    modules = [module for module in tuple(sys.modules.values()) if is_module(module)]
    seen: dict[int, Any] = {id(module): module for module in modules}  # kept alive, so no id is used twice
    todo = list(seen.values())
    while todo:
        owner = todo.pop()
        namespace = module_dict(owner) if is_module(owner) else class_dict(owner)
        held = _values(namespace)
        for value in held:
            # The comparisons of is_class and seen, spelled out: this runs for every name in the process.
            if issubclass(type(value), type) and id(value) not in seen:
                seen[id(value)] = value
                todo.append(value)
        if not wanted.isdisjoint(map(id, held)):
            names = [(attr, namespace.get(attr)) for attr in _names(namespace)]
            found += [(Slot(owner, attr), value) for attr, value in names if id(value) in wanted]
    return found


def _values(namespace: Mapping[str, Any]) -> list[Any]:
    """The values of a dictionary that other threads may be writing to."""
    return _copied(namespace.values)


def _names(namespace: Mapping[str, Any]) -> list[str]:
    return _copied(namespace.keys)


def _copied(view: Callable[[], Iterable[_T]]) -> list[_T]:
    for _ in range(_TRIES):
        try:
            return list(view())
        except RuntimeError:  # it changed its size while it was copied: look again
            continue
    return list(view())
