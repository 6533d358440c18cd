"""Promise 4: by-name copies are found by identity, patched and given back; other references go inert."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

from afd_patch.patch_manager import Patch, switched

TARGET = """
def f(x):
    return x
class C:
    def m(self, x):
        return x
"""
USER = """
before = 1
from target import f, C
from target import f as renamed
after = 2
class Holder:
    first = 1
    raw = f
    class Inner:
        raw = f
    last = 2
method = C.m
"""


def test_copies_are_patched_and_given_back_in_place(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET, user=USER)
    user = __import__("user")
    before = snapshot("target", "user")
    keys = list(vars(user)), list(vars(user.Holder))
    manager.register(tagging("target:f"), tagging("target:C.m"))
    with manager.applied():
        assert user.f(1) == user.renamed(1) == ("patched", 1)
        assert vars(user.Holder)["raw"] is user.f
        assert vars(user.Holder.Inner)["raw"] is user.f
        assert user.method(user.C(), 1) == ("patched", 1)
        assert (list(vars(user)), list(vars(user.Holder))) == keys
    assert snapshot("target", "user") == before
    assert user.f(1) == 1


def test_copies_taken_while_the_patch_was_on_are_given_back(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user=USER)
    target = __import__("target")
    original = [target.f]
    manager.register(tagging("target:f"))
    manager.apply()
    user = __import__("user")
    target.C.kept = target.f
    assert user.renamed(1) == ("patched", 1)
    keys = list(vars(user))
    manager.restore()
    for value in (user.f, user.renamed, vars(user.Holder)["raw"], vars(target.C)["kept"]):
        assert value is original[0]
    assert list(vars(user)) == keys


def test_references_that_cannot_be_swept_go_inert(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"), tagging("target:C.m"))
    manager.apply()
    kept, bound = [target.f], target.C().m
    assert kept[0](1) == bound(1) == ("patched", 1)
    manager.restore()
    assert kept[0](1) == bound(1) == 1
    manager.apply()
    assert target.f(1) == ("patched", 1)
    assert kept[0](1) == 1  # a leftover of the first time stays inert: one call is not patched twice


def test_a_switched_replacement_goes_inert_without_wrapt(write: Any, manager: Any) -> None:
    def build(original: Any, live: Any) -> Any:
        return lambda x: ("patched", original(x)) if live() else original(x)

    write(target=TARGET)
    target = __import__("target")
    manager.register(Patch("switched", "target:f", switched(build), why="test"))
    manager.apply()
    kept = [target.f]
    assert kept[0](1) == ("patched", 1)
    manager.restore()
    assert kept[0](1) == 1


def test_a_copy_that_changed_meanwhile_is_left_alone(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user=USER)
    user = __import__("user")
    manager.register(tagging("target:f"))
    with manager.applied():
        user.renamed = "mine"
        del user.f
    assert user.renamed == "mine"
    assert "f" not in vars(user)


def test_a_copy_in_a_module_that_left_sys_modules_is_given_back(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user=USER)
    user, target = __import__("user"), __import__("target")
    original = [target.f]
    manager.register(tagging("target:f"))
    with manager.applied():
        del sys.modules["user"]
    assert user.f is original[0]


def test_an_inherited_original_stays_what_it_is_for_others(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET + "class D(C):\n    pass\nalias = C.m\n")
    target = __import__("target")
    manager.register(tagging("target:D.m"))
    with manager.applied():
        assert target.D().m(1) == ("patched", 1)
        assert target.C().m(1) == target.alias(target.C(), 1) == 1


def test_lazy_modules_are_not_loaded(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, lazy="raise RuntimeError('loaded')")
    __import__("target")
    spec = importlib.util.find_spec("lazy")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazy"] = module
    loader.exec_module(module)

    class Touchy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"touched: {name}")

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"touched: {name}")

        __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    sys.modules["touchy"] = Touchy("touchy")
    sys.modules["odd"] = Odd()  # type: ignore[assignment]
    sys.modules["nothing"] = None  # type: ignore[assignment]
    manager.register(tagging("target:f"))
    try:
        with manager.applied():
            pass
        assert type(module).__name__ == "_LazyModule"
    finally:
        for name in ("touchy", "odd", "nothing", "lazy"):
            del sys.modules[name]


def test_a_lazily_loaded_target_is_patched_when_it_loads(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    manager.register(tagging("target:f"))
    manager.apply()
    spec = importlib.util.find_spec("target")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["target"] = module
    loader.exec_module(module)
    assert module.f(1) == ("patched", 1)


def test_dictionaries_that_change_during_the_sweep(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, busy="")
    target, busy = __import__("target"), __import__("busy")
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            vars(busy)[f"n{number % 500}"] = number
            vars(busy).pop(f"n{(number * 7) % 500}", None)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        manager.register(tagging("target:f"))
        for _ in range(20):
            manager.apply()
            assert target.f(1) == ("patched", 1)
            manager.restore()
            assert target.f(1) == 1
    finally:
        stop.set()
        thread.join()


HOME = """
def f(x):
    return "home", x
def g(x):
    return "home", x
"""


def test_a_replacement_with_a_home_of_its_own_stays_there(write: Any, manager: Any, snapshot: Any) -> None:
    """make returns a function that lives in a module: its home is no copy of the patched slot."""
    write(target=TARGET, home=HOME, user="from target import f", other="from home import g")
    home = __import__("home")
    manager.register(Patch("homed", "target:f", lambda original: home.g, why="test"))
    before = snapshot("home")
    for _ in range(2):
        manager.apply()
        user, other = __import__("user"), __import__("other")
        assert user.f(1) == ("home", 1)
        manager.restore()
        assert user.f(1) == 1
        assert other.g is home.g
        assert snapshot("home") == before


def test_a_target_that_is_a_copy_itself(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET, user="from target import f\ndef call(x): return f(x)\n")
    user, target = __import__("user"), __import__("target")
    before = snapshot("target", "user")
    manager.register(tagging("target:f"), tagging("user:f"))
    with manager.applied():
        assert target.f(1) == user.call(1) == ("patched", 1)
    assert snapshot("target", "user") == before


def test_patches_stacked_at_import_are_unstacked(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET, user="from target import f\n")
    target = __import__("target")
    original = [target.f]
    manager.register(tagging("target:f"), tagging("user:f"))
    manager.apply()
    user = __import__("user")
    assert target.f(1) == ("patched", 1)
    assert user.f(1) == ("patched", ("patched", 1))
    manager.restore()
    assert user.f is target.f is original[0]


def test_two_functions_that_change_places(write: Any, manager: Any, snapshot: Any) -> None:
    write(target=HOME.replace('"home"', "1"), user="from target import f, g")
    target, user = __import__("target"), __import__("user")
    f, g = [target.f], [target.g]
    before = snapshot("target", "user")
    manager.register(
        Patch("f", "target:f", lambda original: g[0], why="test"),
        Patch("g", "target:g", lambda original: f[0], why="test"),
    )
    for _ in range(2):
        with manager.applied():
            assert (target.f, target.g) == (user.f, user.g) == (g[0], f[0])
        assert snapshot("target", "user") == before
