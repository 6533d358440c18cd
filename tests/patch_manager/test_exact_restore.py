"""Promise 1: restore is exact, for every kind of slot."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from afd_patch.patch_manager import Patch, PatchError, PatchState

ZOO = '''
def function(x):
    return x

alias = function
constant = 3
also_three = 3

class Guard(type):
    """A metaclass that hides and refuses everything that goes through it."""
    def __setattr__(cls, name, value):
        raise TypeError("refused")
    def __delattr__(cls, name):
        raise TypeError("refused")
    def __getattr__(cls, name):
        raise RuntimeError("asked the metaclass for " + name)
    @property
    def __dict__(cls):
        raise RuntimeError("asked the metaclass for __dict__")
    @property
    def __mro__(cls):
        raise RuntimeError("asked the metaclass for __mro__")

class Base:
    made = 0
    def __init__(self, size=1):
        self.size = size
        Base.made += 1
    def method(self, x):
        return x
    other_name = method
    @classmethod
    def cmethod(cls, x):
        return cls.__name__, x
    @staticmethod
    def smethod(x):
        return x
    @property
    def prop(self):
        return self.size
    @prop.setter
    def prop(self, value):
        self.size = value
    def __call__(self, x):
        return x
    class Nested:
        def method(self, x):
            return x
    def last(self):
        return "last"

class Child(Base):
    def __init__(self):
        super().__init__(5)
    def own(self, x):
        return super().method(x)

class Plain(Base):
    pass

class Guarded(Base, metaclass=Guard):
    def guarded(self, x):
        return x

class Slotted:
    __slots__ = ("value",)
    def method(self, x):
        return x
'''

# target, an expression that runs it, what it gives without the patch
KINDS = [
    ("function", "zoo.function(1)", 1),
    ("alias", "zoo.alias(1)", 1),
    ("alias", "zoo.function(1)", 1),
    ("function", "zoo.alias(1)", 1),
    ("Base.method", "zoo.Base().method(1)", 1),
    ("Base.method", "zoo.Base.method(zoo.Base(), 1)", 1),
    ("Base.method", "zoo.Child().method(1)", 1),
    ("Base.method", "zoo.Base().other_name(1)", 1),
    ("Base.cmethod", "zoo.Base.cmethod(1)", ("Base", 1)),
    ("Base.cmethod", "zoo.Child().cmethod(1)", ("Child", 1)),
    ("Base.smethod", "zoo.Base.smethod(1)", 1),
    ("Base.smethod", "zoo.Base().smethod(1)", 1),
    ("Base.prop", "zoo.Base().prop", 1),
    ("Base.__call__", "zoo.Base()(1)", 1),
    ("Base.Nested.method", "zoo.Base.Nested().method(1)", 1),
    ("Child.own", "zoo.Child().own(1)", 1),
    ("Child.method", "zoo.Child().method(1)", 1),
    ("Child.cmethod", "zoo.Child.cmethod(1)", ("Child", 1)),
    ("Child.smethod", "zoo.Child.smethod(1)", 1),
    ("Child.prop", "zoo.Child().prop", 5),
    ("Child.Nested.method", "zoo.Child.Nested().method(1)", 1),
    ("Guarded.guarded", "zoo.Guarded().guarded(1)", 1),
    ("Guarded.method", "zoo.Guarded().method(1)", 1),
    ("Slotted.method", "zoo.Slotted().method(1)", 1),
]


@pytest.fixture
def zoo(write: Any) -> Any:
    write(zoo=ZOO)
    return __import__("zoo")


@pytest.mark.parametrize(("target", "expression", "native"), KINDS)
def test_every_kind_is_patched_and_restored_by_identity(
    zoo: Any, manager: Any, tagging: Any, snapshot: Any, target: str, expression: str, native: Any
) -> None:
    space = {"zoo": zoo}
    zoo.Base.made = 0
    assert eval(expression, space) == native
    zoo.Base.made = 0
    before = snapshot("zoo")

    manager.register(tagging(f"zoo:{target}"))
    manager.apply()
    assert eval(expression, space) == ("patched", native)
    assert snapshot("zoo") != before

    manager.restore()
    assert eval(expression, space) == native
    zoo.Base.made = 0
    assert snapshot("zoo") == before


@pytest.mark.parametrize("name", ["method", "cmethod", "smethod", "__init__", "prop"])
def test_an_inherited_slot_is_deleted_and_the_base_untouched(zoo: Any, manager: Any, tagging: Any, name: str) -> None:
    own = vars(zoo.Base)[name]
    manager.register(tagging(f"zoo:Plain.{name}"))
    manager.apply()
    assert name in vars(zoo.Plain)
    assert vars(zoo.Base)[name] is own
    manager.restore()
    assert name not in vars(zoo.Plain)


@pytest.mark.parametrize("target", ["Base.__init__", "Child.__init__", "Plain.__init__"])
def test_constructors_work_with_inheritance(zoo: Any, manager: Any, target: str, snapshot: Any) -> None:
    from afd_patch.patch_manager import host

    seen: list[tuple[str, int]] = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        seen.append((type(instance).__name__, instance.size))
        return result

    before = snapshot("zoo")
    manager.register(Patch("constructor", f"zoo:{target}", host(wrapper), why="test"))
    with manager.applied():
        assert zoo.Base(2).size == 2
        assert zoo.Child().size == 5
        assert zoo.Plain(7).size == 7
        zoo.Base.__init__(instance := zoo.Base.__new__(zoo.Base), 9)
        assert instance.size == 9
    expected = {
        "Base.__init__": [("Base", 2), ("Child", 5), ("Plain", 7), ("Base", 9)],
        "Child.__init__": [("Child", 5)],
        "Plain.__init__": [("Plain", 7)],
    }
    assert seen == expected[target]
    zoo.Base.made = 0
    assert snapshot("zoo") == before
    zoo.Child()
    assert len(seen) == len(expected[target])


def test_a_property_keeps_its_setter(zoo: Any, manager: Any, tagging: Any) -> None:
    manager.register(tagging("zoo:Base.prop"))
    with manager.applied():
        base = zoo.Base()
        base.prop = 4
        assert base.prop == ("patched", 4)


def test_a_plain_replacement_of_function_class_and_constant(zoo: Any, manager: Any, snapshot: Any) -> None:
    def make_function(original: Any) -> Any:
        def function(x: Any) -> Any:
            return "plain", original(x)

        return function

    before = snapshot("zoo")
    manager.register(
        Patch("function", "zoo:function", make_function, why="test", params=("x",)),
        Patch("class", "zoo:Slotted", lambda cls: type("Slotted", (cls,), {"__slots__": ()}), why="test"),
        Patch("constant", "zoo:constant", lambda value: value + 1, why="test"),
    )
    base = zoo.Slotted
    with manager.applied():
        assert zoo.function(1) == zoo.alias(1) == ("plain", 1)
        assert zoo.Slotted is not base
        assert zoo.constant == 4
        assert zoo.also_three == 3  # a constant is shared by everybody: identity says nothing
    assert snapshot("zoo") == before


def test_order_is_kept(zoo: Any, manager: Any, tagging: Any) -> None:
    keys, class_keys = list(vars(zoo)), list(vars(zoo.Base))
    manager.register(tagging("zoo:function"), tagging("zoo:Base.cmethod"), tagging("zoo:Base.method"))
    with manager.applied():
        assert list(vars(zoo)) == keys
        assert list(vars(zoo.Base)) == class_keys
    assert list(vars(zoo)) == keys
    assert list(vars(zoo.Base)) == class_keys


def test_only_the_slot_without_copies(zoo: Any, manager: Any, tagging: Any) -> None:
    manager.register(tagging("zoo:function", copies=False))
    with manager.applied():
        assert zoo.function(1) == ("patched", 1)
        assert zoo.alias(1) == 1


def test_what_a_host_patch_cannot_wrap_is_refused(zoo: Any, manager: Any, tagging: Any) -> None:
    manager.register(tagging("zoo:constant"))
    with pytest.raises(PatchError, match=r"zoo:constant.*int"):
        manager.apply()
    assert zoo.constant == 3
    assert manager.status()[0].state is PatchState.FAILED


def test_the_finder_is_gone_after_restore(zoo: Any, manager: Any, tagging: Any) -> None:
    before = list(sys.meta_path)
    manager.register(tagging("zoo:function"), tagging("not_there_yet:f"))
    manager.apply()
    assert sys.meta_path != before
    manager.restore()
    assert sys.meta_path == before
