"""Import-time patching: tells the manager that a module was executed before anybody can bind its names.

A finder in front of ``sys.meta_path`` lends modules that are waited for a loader that calls back right after
the module's code has run, inside the import: what the callback raises comes out of the import statement. The
module itself keeps its native spec and loader. (wrapt's import hooks were not used: they cannot be
unregistered, one that raises drops the others, and they fire on half-initialised modules.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from afd_patch.errors import PatchError
from afd_patch.patch_manager.slots import is_module, module_dict

OnImport = Callable[[str], None]


class PatchingFinder:
    """Finds armed modules through the finders behind it and lends their specs a patching loader."""

    def __init__(self, on_import: OnImport) -> None:
        self.armed: set[str] = set()
        self._on_import = on_import

    def install(self) -> None:
        """Puts the finder in front of ``sys.meta_path``, once."""
        if not any(finder is self for finder in sys.meta_path):
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Takes the finder off ``sys.meta_path``.

        The list is replaced, not changed: an import in another thread iterates over it, and an entry that
        vanishes before its position would make it skip a finder and miss a module that exists.
        """
        if any(finder is self for finder in sys.meta_path):
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Implements ``importlib.abc.MetaPathFinder``; answers for armed modules only."""
        if fullname not in self.armed:
            return None
        finders = list(sys.meta_path)
        here = next((place for place, finder in enumerate(finders) if finder is self), -1)
        # Only those behind: two managers' finders would otherwise ask each other forever.
        for finder in finders[here + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is None:
                continue
            if spec.loader is not None:  # None: a namespace package, which has no code to wait for
                if not hasattr(spec.loader, "exec_module"):
                    raise PatchError(
                        f"module {fullname} has patches waiting, but its loader {spec.loader!r} has no "
                        f"exec_module, so it cannot be patched at import; import it before apply()."
                    )
                spec.loader = PatchingLoader(spec.loader, fullname, self._on_import)
            found: ModuleSpec = spec
            return found
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached here."""


class PatchingLoader:
    """A module's native loader, plus the call back after execution; anything else is the native loader's."""

    def __init__(self, native: Any, name: str, on_import: OnImport) -> None:
        self._native = native
        self._name = name
        self._on_import = on_import

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "_native":  # copies and pickles ask before __init__ ran
            raise AttributeError(attribute)
        return getattr(self._native, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Delegates; import asks for it on the loader's class in places, so it is spelled out."""
        create = getattr(self._native, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its native loader back, runs its code, and reports it if it really is imported."""
        namespace = module_dict(module)
        spec: Any = namespace.get("__spec__")
        if getattr(spec, "loader", None) is self:
            spec.loader = self._native
        if namespace.get("__loader__") is self:
            namespace["__loader__"] = self._native
        self._native.exec_module(module)
        # Tools execute private copies of modules; only what sys.modules got is what others will import.
        if namespace is module_dict_of(self._name) or self._replaced(module):
            self._on_import(self._name)

    def _replaced(self, module: ModuleType) -> bool:
        """Whether the module's code put another object into ``sys.modules`` in its own place."""
        current = sys.modules.get(self._name)
        spec = module_dict(module).get("__spec__")
        return current is not None and current is not module and getattr(spec, "_initializing", False)


def module_dict_of(name: str) -> dict[str, Any] | None:
    """The dictionary of the module that ``sys.modules`` has under ``name``, if it is a module."""
    module = sys.modules.get(name)
    return module_dict(module) if is_module(module) else None


def initializing_spec(module: Any) -> ModuleSpec | None:
    """The spec of a module whose code is still running in an import, else None."""
    spec = module_dict(module).get("__spec__") if is_module(module) else None
    return spec if getattr(spec, "_initializing", False) else None


def when_initialized(spec: ModuleSpec, on_ready: Callable[[], None]) -> None:
    """Calls ``on_ready`` in the importing thread when the import system is done with the module of ``spec``.

    For a module that is executed by its native loader already, so that it is too late to lend it ours. The
    last thing the import system does, under the module's lock, is ``spec._initializing = False``; until then
    no other thread's import returns the module. So the spec watches that assignment: it gets a subclass of
    its own class, and its own class back when the assignment comes. The caller looks again whether the module
    is still being initialised, because the import may have ended just before the watch began.
    """
    native = type(spec)

    class Watched(native):  # type: ignore[valid-type, misc]
        __slots__ = ()

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "_initializing" or value:
                super().__setattr__(name, value)
                return
            object.__setattr__(self, "__class__", native)
            try:
                on_ready()
            finally:
                setattr(self, name, value)

    Watched.__name__, Watched.__qualname__ = native.__name__, native.__qualname__
    Watched.__module__ = native.__module__
    spec.__class__ = Watched
    if not getattr(spec, "_initializing", False) and type(spec) is Watched:
        object.__setattr__(spec, "__class__", native)  # the import ended just before the watch began
