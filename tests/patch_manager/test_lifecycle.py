"""Promise 6: apply and restore in any order and number; reload and overwrite are noticed.

``all_orders.py`` runs the lifecycle through every order of small steps.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_patch import errors
from afd_patch.patch_manager import PatchError, PatchState

TARGET = """
def f(x):
    return x
class C:
    def m(self, x):
        return x
class D(C):
    pass
"""


def test_every_order_of_imports_applies_and_restores(tmp_path: Path) -> None:
    root = Path(errors.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("all_orders.py"), tmp_path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == math.factorial(5) + math.factorial(6) // 4


def test_apply_twice_is_once_and_restore_twice_is_once(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    before = snapshot("target")
    manager.restore()
    manager.register(tagging("target:f"), tagging("target:D.m"))
    manager.restore()
    for _ in range(3):
        manager.apply()
        once = snapshot("target")
        manager.apply()
        assert snapshot("target") == once
        assert target.f(1) == target.D().m(1) == ("patched", 1)
        manager.restore()
        manager.restore()
        assert snapshot("target") == before


def test_the_scope_restores_after_an_exception(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:f"))
    with pytest.raises(ZeroDivisionError), manager.applied():
        raise ZeroDivisionError
    assert snapshot("target") == before


def test_what_is_registered_later_is_applied_by_the_next_apply(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"))
    manager.apply()
    manager.register(tagging("target:D.m"))
    assert manager.status()[1].state is PatchState.REGISTERED
    with pytest.raises(PatchError, match="1 of 2 patches"):
        manager.require_applied()
    manager.apply()
    assert target.f(1) == target.D().m(1) == ("patched", 1)
    assert target.D().m(1) == ("patched", 1)


@pytest.mark.parametrize("path", ["f", "C.m", "D.m"])
def test_a_reload_is_noticed_repaired_and_restored(
    write: Any, manager: Any, tagging: Any, snapshot: Any, path: str
) -> None:
    write(target=TARGET)
    target = __import__("target")
    old_class, old_dict = target.C, dict(vars(target.C))

    def call() -> Any:
        return target.f(1) if path == "f" else getattr(target, path[0])().m(1)

    manager.register(tagging(f"target:{path}"))
    manager.apply()
    importlib.reload(target)
    native = snapshot("target")
    assert call() == 1
    assert manager.status()[0].state is PatchState.LOST
    assert "reloaded" in manager.status()[0].detail
    with pytest.raises(PatchError, match="reloaded"):
        manager.require_applied()

    manager.apply()
    manager.require_applied()
    assert call() == ("patched", 1)
    manager.restore()
    assert snapshot("target") == native
    assert dict(vars(old_class)) == old_dict


@pytest.mark.parametrize("path", ["f", "D.m"])
def test_restore_after_a_reload_leaves_the_new_code_alone(
    write: Any, manager: Any, tagging: Any, snapshot: Any, path: str
) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging(f"target:{path}"))
    manager.apply()
    importlib.reload(target)
    native = snapshot("target")
    manager.restore()
    assert snapshot("target") == native
    assert manager.status()[0].state is PatchState.RESTORED


def test_a_module_imported_anew_is_noticed(write: Any, manager: Any, tagging: Any, snapshot: Any) -> None:
    write(target=TARGET)
    old = __import__("target")
    before = snapshot("target")
    manager.register(tagging("target:f"))
    manager.apply()
    del sys.modules["target"]
    new = __import__("target")
    assert new.f(1) == 1
    assert manager.status()[0].state is PatchState.LOST
    assert "imported anew" in manager.status()[0].detail
    manager.apply()
    assert new.f(1) == ("patched", 1)
    manager.restore()
    assert new.f(1) == 1
    sys.modules["target"] = old
    assert snapshot("target") == before


def test_an_overwrite_is_noticed_and_repaired(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f"))
    manager.apply()
    target.f = foreign = lambda x: ("foreign", x)
    status = manager.status()[0]
    assert status.state is PatchState.LOST
    assert "test_lifecycle" in status.detail and "overwritten" in status.detail
    with pytest.raises(PatchError, match="overwritten"):
        manager.require_applied()
    manager.apply()
    assert target.f(1) == ("patched", ("foreign", 1))
    manager.restore()
    assert target.f is foreign
