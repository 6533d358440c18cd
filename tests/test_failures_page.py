"""docs/failures.md: every row names tests, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "failures.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| when ")
]


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
