"""A script, run by test_lifecycle in a fresh interpreter: every order of imports, applies and restores.

Each order has modules of its own names and a manager of its own. After every step, what must hold is checked
against the plainest model there is: patches are on after an apply and off after a restore. Prints how many
orders were run. Its argument is a folder for the modules.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afd_patch.patch_manager import Patch, PatchManager, PatchState, host

SETS_OF_STEPS = (
    ("import target", "import user", "import late", "apply", "restore"),
    ("import target", "import user", "apply", "restore", "apply", "restore"),
)
SOURCES = {
    "target": "def f(x): return x\nclass C:\n    def m(self, x): return x\nclass D(C): pass\n",
    "user": "from target{0} import f\nfrom target{0} import D\n",
    "late": "import target{0}\nf = target{0}.f\nD = target{0}.D\n",
}


def tag(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return "patched", wrapped(*args, **kwargs)


def look(module: Any) -> list[list[tuple[str, int]]]:
    """The keys of a module and its classes in order, the values by identity."""
    spaces = [vars(module), vars(module.D), vars(module.D.__mro__[1])]
    return [[(key, id(value)) for key, value in space.items()] for space in spaces]


def run(order: Sequence[str], number: int) -> None:
    names = {kind: f"{kind}{number}" for kind in SOURCES}
    for kind, name in names.items():
        (Path(sys.argv[1]) / f"{name}.py").write_text(SOURCES[kind].format(number))
    manager = PatchManager()
    manager.register(
        Patch("f", f"{names['target']}:f", host(tag), why="test", params=("x",)),
        Patch("m", f"{names['target']}:D.m", host(tag), why="test"),
    )
    meta_path, native, on = list(sys.meta_path), {}, False
    for step in order:
        if step == "apply":
            manager.apply()
            on = True
        elif step == "restore":
            manager.restore()
            on = False
        else:
            __import__(names[step.removeprefix("import ")])
        loaded = [sys.modules[name] for name in names.values() if name in sys.modules]
        for module in loaded:
            expected = ("patched", 1) if on else 1
            assert module.f(1) == module.D().m(1) == expected, (order, step, module)
        states = {status.state for status in manager.status()}
        if on:
            assert states == {PatchState.APPLIED if loaded else PatchState.PENDING}, (order, step, states)
            continue
        assert states <= {PatchState.REGISTERED, PatchState.RESTORED}, (order, step, states)
        assert sys.meta_path == meta_path, (order, step)
        for module in loaded:
            assert "m" not in vars(module.D), (order, step)
            assert type(module.f) is type(run), (order, step)
            assert look(module) == native.setdefault(module.__name__, look(module)), (order, step)
    manager.restore()
    for name in names.values():
        sys.modules.pop(name, None)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    sys.dont_write_bytecode = True
    orders = [order for steps in SETS_OF_STEPS for order in sorted(set(itertools.permutations(steps)))]
    for number, order in enumerate(orders):
        run(order, number)
    print(len(orders))


if __name__ == "__main__":
    main()
