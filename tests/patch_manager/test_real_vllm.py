"""The promises on the real vLLM, in one fresh interpreter that imports it once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afd_patch import errors


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_is_patched_before_and_after_its_import_and_restored_exactly() -> None:
    root = Path(errors.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_real_vllm.py")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "apply imports nothing: True" in result.stdout
    assert "patched at import and restored: True" in result.stdout
    assert "dictionaries identical" in result.stdout
    assert "copies taken while on were given back: True" in result.stdout
