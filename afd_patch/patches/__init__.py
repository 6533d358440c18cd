"""What we change in vLLM: one file per seam, and nothing outside of this folder.

``patch_set`` lists the patches of a role; ``docs/patch-points.md`` is generated from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afd_patch.patches import construction, engine_config, forward_context, lora, model_load, vocabulary, weights

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig
    from afd_patch.patch_manager import Patch


def patch_set(config: AFDConfig) -> list[Patch]:
    """Every patch of the role that ``config`` names."""
    return [
        *engine_config.patches(config),
        *construction.patches(config),
        *weights.patches(config),
        *model_load.patches(config),
        *forward_context.patches(config),
        *lora.patches(config),
        *vocabulary.patches(config),
    ]
