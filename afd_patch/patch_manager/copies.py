"""Finds by-name copies: slots of modules and classes that hold a given object, by identity.

It looks at the globals of every module in ``sys.modules`` and at the own dictionaries of the classes found
there (nested ones too). It never loads a lazy module and only reads. References that live elsewhere (in
containers, closures, default arguments, instances) cannot be found; replacements go inert there by a switch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from afd_patch.patch_manager.slots import Slot, class_dict, is_class, is_module, module_dict

_TRIES = 100


def can_be_swept(value: Any) -> bool:
    """Whether identity means "a copy of this": constants like ``None`` or ``3`` are shared by everybody."""
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))


def find(values: Iterable[Any]) -> list[tuple[Slot, Any]]:
    """All slots that hold one of ``values``, each with the value found in it."""
    wanted = {id(value) for value in values}
    found: list[tuple[Slot, Any]] = []
    if not wanted:
        return found
    seen: dict[int, Any] = {}  # keeps what was visited alive, so that no id is used twice
    todo: list[Any] = [module for module in tuple(sys.modules.values()) if is_module(module)]
    while todo:
        owner = todo.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        items = _snapshot(module_dict(owner) if is_module(owner) else class_dict(owner))
        for attr, value in items:
            if id(value) in wanted:
                found.append((Slot(owner, attr), value))
            if is_class(value):
                todo.append(value)
    return found


def _snapshot(namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The items of a dictionary that other threads may be writing to."""
    for _ in range(_TRIES):
        try:
            return list(namespace.items())
        except RuntimeError:  # it changed its size during iteration: look again
            continue
    return [(key, namespace[key]) for key in list(namespace) if key in namespace]
