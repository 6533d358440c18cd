"""docs/failures.md: every row names tests, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from afd_patch.ffn.server import DRAIN_IDLE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failures.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| when ")]


def test_every_row_names_a_test_that_exists() -> None:
    assert len(ROWS) > 25
    text = ""
    for row in ROWS:
        cell = row.rstrip(" |").rpartition("|")[2]
        if file := re.search(r"`(tests/\S+\.py)`", cell):
            text = (ROOT / file[1]).read_text()
        names = re.findall(r"`(test_\w+)`", cell)
        assert names, f"no test: {row}"
        for name in names:
            assert f"def {name}(" in text, f"{name}: {row}"


def test_times() -> None:
    assert f"called last {DRAIN_IDLE:g} s ago or longer" in PAGE
