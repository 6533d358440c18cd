"""One declarative table per model family: native classes, what crosses, who owns which weight, what is refused.

To add a model, add a table here and a test; nothing else changes. ``find`` is the only way in.
"""

from __future__ import annotations

import difflib

from afd_patch.boundaries.deepseek_v2 import DEEPSEEK_V2
from afd_patch.boundaries.dense import LLAMA, QWEN3
from afd_patch.boundaries.mixtral import MIXTRAL
from afd_patch.boundaries.qwen3_moe import QWEN3_MOE
from afd_patch.boundaries.table import Boundary, OwnedBy, WeightRules
from afd_patch.errors import UnsupportedError

TABLES: tuple[Boundary, ...] = (DEEPSEEK_V2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE)

__all__ = ["TABLES", "Boundary", "OwnedBy", "WeightRules", "architectures", "find"]


def architectures() -> tuple[str, ...]:
    """Every architecture that has a table, sorted."""
    return tuple(sorted(name for table in TABLES for name in table.architectures))


def find(architecture: str) -> Boundary:
    """The table of ``architecture`` (the name in the checkpoint's ``config.json``)."""
    for table in TABLES:
        if architecture in table.architectures:
            return table
    known = architectures()
    near = difflib.get_close_matches(architecture, known, n=1)
    hint = f"; the nearest one is {near[0]}" if near else ""
    raise UnsupportedError(
        f"{architecture} has no boundary table, so it cannot be split{hint}; "
        f"known: {', '.join(known)}; docs/adding-a-model.md says how to write one"
    )
