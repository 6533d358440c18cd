"""Breaks the manager on purpose, one bug at a time, and asks that its tests notice.

Each bug is a replacement in the source of a copy of the package; the text must occur exactly once, so that
the list cannot go stale silently. The tests named with it run against the copy in a process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from afd_patch import errors

PACKAGE = Path(errors.__file__).parent
TESTS = Path(__file__).parent


class Bug(NamedTuple):
    """One deliberate bug: where, what, and which tests (pytest's ``file -k words``) must notice."""

    file: str
    text: str
    broken: str
    tests: str
    words: str = ""


BUGS = {
    "set instead of delete": Bug(
        "application.py", "self.slot.delete()", "self.slot.write(self.original)", "exact_restore", "inherited"
    ),
    "wrapper saved as the original": Bug(
        "application.py",
        "self.replacement = self._make()",
        "self.replacement = self.original = self._make()",
        "exact_restore",
    ),
    "swept copy not given back": Bug(
        "application.py", "copy.write(self.original)", "pass", "copies", "left_sys_modules"
    ),
    "late copy not given back": Bug(
        "manager.py", "sweep_out([application for _, application in taken])", "sweep_out([])", "copies"
    ),
    "copies not patched": Bug(
        "application.py", "originals[id(value)].put_into_copy(slot)", "pass", "copies", "in_place"
    ),
    "copies in classes not found": Bug("copies.py", "todo.append(value)", "pass", "copies", "in_place"),
    "constants taken for copies": Bug(
        "copies.py",
        "return callable(value) or isinstance(value, (classmethod, staticmethod, property))",
        "return True",
        "exact_restore",
        "constant",
    ),
    "a replacement's home taken for a copy": Bug(
        "application.py",
        "return slot.key not in self.homes and (not self.homes or slot.attr == self.patch.path[-1])",
        "return True",
        "copies",
        "home",
    ),
    "inherited original swept": Bug("application.py", "and not application.created and", "and", "copies", "inherited"),
    "lazy modules loaded": Bug(
        "slots.py",
        "namespace: dict[str, Any] = _MODULE_DICT.__get__(module)",
        "namespace = vars(module)",
        "copies",
        "lazy",
    ),
    "metaclass asked": Bug(
        "slots.py",
        "type.__setattr__(self.owner, self.attr, value)",
        "setattr(self.owner, self.attr, value)",
        "exact_restore",
        "Guarded",
    ),
    "order lost": Bug(
        "slots.py",
        "module_dict(self.owner)[self.attr] = value",
        "module_dict(self.owner).pop(self.attr, None); module_dict(self.owner)[self.attr] = value",
        "exact_restore",
        "order",
    ),
    "switch ignored": Bug(
        "patch.py",
        "return wrapt.FunctionWrapper(original, wrapper, enabled=live)",
        "return wrapt.FunctionWrapper(original, wrapper)",
        "copies",
        "inert",
    ),
    "switched on before the work is done": Bug("patch.py", "self.on = False", "self.on = True", "transaction", "inert"),
    "not switched off": Bug("manager.py", "application.switch.on = False", "pass", "copies", "inert"),
    "params not checked": Bug("slots.py", "    if missing:", "    if False:", "transaction", "params"),
    "no rollback of slots": Bug(
        "application.py", "undo.callback(application.take_out)", "pass", "transaction", "leaves_nothing"
    ),
    "no rollback of earlier rounds": Bug(
        "manager.py",
        "obstacles = self._withdraw(undone)",
        "obstacles = []",
        "transaction",
        "put_in",
    ),
    "applied before the slot is written": Bug(
        "manager.py",
        "entry.state, entry.detail = PatchState.FAILED, str(error) or type(error).__name__",
        "entry.state = PatchState.APPLIED",
        "transaction",
    ),
    "failure swallowed in the import hook": Bug(
        "imports.py",
        "            self._on_import(self._name)\n",
        "            import contextlib\n"
        "            with contextlib.suppress(Exception):\n                self._on_import(self._name)\n",
        "transaction",
        "at_import",
    ),
    "disarmed after a failed import": Bug(
        "manager.py",
        "            waiting = [\n",
        "            self._finder.armed.discard(name)\n            waiting = [\n",
        "transaction",
        "at_import",
    ),
    "finder left on sys.meta_path": Bug(
        "imports.py",
        "sys.meta_path = [finder for finder in sys.meta_path if finder is not self]",
        "pass",
        "exact_restore",
        "finder",
    ),
    "finder removed beneath a running import": Bug(
        "imports.py",
        "sys.meta_path = [finder for finder in sys.meta_path if finder is not self]",
        "sys.meta_path.remove(self)",
        "threads",
        "finder",
    ),
    "restore cancels nothing": Bug(
        "manager.py", "self._disarm(set(self._finder.armed))", "pass", "exact_restore", "finder"
    ),
    "our loader left on the module": Bug(
        "imports.py", 'namespace["__loader__"] = self._native', "pass", "import_time", "native"
    ),
    "a private copy taken for the import": Bug(
        "imports.py",
        "if namespace is module_dict_of(self._name) or self._replaced(module):",
        "if True:",
        "import_time",
        "asked_everything",
    ),
    "half-initialised modules taken for finished ones": Bug(
        "imports.py",
        'return spec if getattr(spec, "_initializing", False) else None',
        "return None",
        "import_time",
        "half_initialised",
    ),
    "foreign object overwritten": Bug(
        "application.py", "        if current is self.replacement:", "        if True:", "foreign"
    ),
    "conflict not raised": Bug("manager.py", 'raise RestoreConflict(" ".join(conflicts))', "pass", "foreign", "above"),
    "ours put on top of itself after a conflict": Bug(
        "application.py",
        "if previous is not None and previous.in_effect():",
        "if False:",
        "foreign",
        "above",
    ),
    "LOST not noticed": Bug("report.py", "if not application.in_effect():", "if False:", "lifecycle", "noticed"),
    "stale original used": Bug("manager.py", "elif application.is_fresh():", "elif True:", "threads", "changes"),
    "restore forgotten by an apply under way": Bug(
        "manager.py", "if entry.state is not PatchState.PENDING:", "if False:", "threads", "wins"
    ),
    "make runs under the lock": Bug(
        "manager.py",
        "(entry, module, prepare(entry.patch, module, entry.application))",
        "(_LOCK.acquire(), entry, module, prepare(entry.patch, module, entry.application), _LOCK.release())[1:4]",
        "threads",
        "does_not_deadlock",
    ),
    "fork does not take the lock": Bug(
        "manager.py",
        "os.register_at_fork(before=_LOCK.acquire, ",
        "dict(before=_LOCK.acquire, ",
        "processes",
        "another_thread",
    ),
    "barrier asks for failures only": Bug(
        "report.py", "is not PatchState.APPLIED:", "is PatchState.FAILED:", "barrier", "every_missing"
    ),
}


def run_tests(
    folder: Path, tests: list[str], words: str = "", patience: str = "60"
) -> subprocess.CompletedProcess[str]:
    """Runs tests of this room against the package in ``folder``, away from this repository's settings."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in ("conftest.py", *(f"test_{test}.py" for test in tests)):
        shutil.copy(TESTS / name, folder / name)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-k", words]
    return subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
            "PATCH_TESTS_PATIENCE": patience,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of this room and the errors, without the rest of the house."""
    shutil.copytree(
        PACKAGE / "patch_manager",
        tmp_path / "afd_patch" / "patch_manager",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(PACKAGE / "errors.py", tmp_path / "afd_patch" / "errors.py")
    (tmp_path / "afd_patch" / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(copy: Path, name: str) -> None:
    bug = BUGS[name]
    source = copy / "afd_patch" / "patch_manager" / bug.file
    text = source.read_text()
    assert text.count(bug.text) == 1, f"the text to break occurs {text.count(bug.text)} times in {bug.file}"
    source.write_text(text.replace(bug.text, bug.broken))
    result = run_tests(copy, [bug.tests], bug.words, patience="2")  # seconds; a deadlock is a bug noticed
    assert result.returncode == 1, result.stdout + result.stderr  # 1: tests ran and failed
    assert "error" not in result.stdout.splitlines()[-1], result.stdout


def test_without_a_bug_the_same_tests_pass(copy: Path) -> None:
    result = run_tests(copy, sorted({bug.tests for bug in BUGS.values()} - {"lifecycle"}))
    assert result.returncode == 0, result.stdout + result.stderr
    result = run_tests(copy, ["lifecycle"], "noticed")
    assert result.returncode == 0, result.stdout + result.stderr
