"""One declarative table per model family: native classes, what crosses, who owns which weight, what is refused.

To add a model, add a table here and a test; nothing else changes. ``find`` is the only way in.
"""

from __future__ import annotations

import difflib

from afd_patch.boundaries.deepseek_v2 import DEEPSEEK_V2
from afd_patch.boundaries.deepseek_v4 import DEEPSEEK_V4
from afd_patch.boundaries.dense import LLAMA, QWEN3
from afd_patch.boundaries.ernie4_5_moe import ERNIE4_5_MOE
from afd_patch.boundaries.glm4_moe import GLM4_MOE
from afd_patch.boundaries.gpt_oss import GPT_OSS
from afd_patch.boundaries.llama4 import LLAMA4
from afd_patch.boundaries.minimax_m2 import MINIMAX_M2
from afd_patch.boundaries.mixtral import MIXTRAL
from afd_patch.boundaries.olmoe import OLMOE
from afd_patch.boundaries.qwen2_moe import QWEN2_MOE
from afd_patch.boundaries.qwen3_moe import QWEN3_MOE
from afd_patch.boundaries.qwen3_next import QWEN3_5, QWEN3_NEXT
from afd_patch.boundaries.step3 import STEP3_TEXT
from afd_patch.boundaries.table import Boundary, OwnedBy, OwnGate, Router, WeightRules
from afd_patch.errors import UnsupportedError

TABLES: tuple[Boundary, ...] = (
    DEEPSEEK_V2,
    DEEPSEEK_V4,
    ERNIE4_5_MOE,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    STEP3_TEXT,
)

__all__ = ["TABLES", "Boundary", "OwnGate", "OwnedBy", "Router", "WeightRules", "architectures", "find"]


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
