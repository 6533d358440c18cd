"""Promise 8: the barrier lists every patch that is not in effect, and why; and what a process loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_patch import errors
from afd_patch.errors import AFDError
from afd_patch.patch_manager import PatchError, PatchNotApplied, PatchState, RestoreConflict

TARGET = "def f(x): return x\ndef g(x): return x\ndef h(x): return x\n"


def test_every_missing_patch_is_listed_with_state_and_reason(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    target = __import__("target")
    manager.register(tagging("target:f", "good"), tagging("target:g", "lost"), tagging("later:f", "waiting"))
    manager.apply()
    target.g = len
    manager.register(tagging("target:h", "new"))
    with pytest.raises(PatchNotApplied) as caught:
        manager.require_applied()
    message = str(caught.value)
    for word in (
        "3 of 4 patches",
        "'lost' on target:g is lost: the slot was overwritten",
        "'waiting' on later:f is pending: module later has not been imported",
        "'new' on target:h is registered: apply() was not called",
        "apply() again",
    ):
        assert word in message
    assert "'good'" not in message
    manager.require_applied(["good"])
    with pytest.raises(PatchNotApplied, match=r"1 of 2 .*'unknown' is not registered"):
        manager.require_applied(["good", "unknown"])


def test_before_apply_and_after_restore_nothing_passes(write: Any, manager: Any, tagging: Any) -> None:
    write(target=TARGET)
    __import__("target")
    manager.register(tagging("target:f"))
    with pytest.raises(PatchNotApplied, match="registered"):
        manager.require_applied()
    manager.apply()
    manager.require_applied()
    manager.restore()
    with pytest.raises(PatchNotApplied, match="it was taken back"):
        manager.require_applied()


def test_status_carries_what_a_reader_needs(manager: Any, tagging: Any) -> None:
    manager.register(tagging("later:f", "one", upstream="PR 1", removal="when 1 is merged"))
    (status,) = manager.status()
    assert (status.name, status.target, status.state) == ("one", "later:f", PatchState.REGISTERED)
    assert (status.why, status.upstream, status.removal) == (
        "the test asks for it",
        "PR 1",
        "when 1 is merged",
    )


def test_the_errors_are_one_family() -> None:
    assert issubclass(PatchError, AFDError)
    assert issubclass(RestoreConflict, PatchError)
    assert issubclass(PatchNotApplied, PatchError)


def test_the_manager_loads_neither_vllm_nor_torch() -> None:
    root = Path(errors.__file__).parents[1]
    code = (
        "import sys, afd_patch.patch_manager\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch', 'transformers')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
