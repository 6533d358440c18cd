"""Forward contexts of an active role carry ``additional_kwargs["afd_metadata"]``.

Creation itself is wrapped, so dummy, profile and warm-up runs, both model runners and micro-batch children are
covered, and nothing is installed per call site.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_patch.metadata import AFD_METADATA, AFDForwardContextMetadata
from afd_patch.patch_manager import Patch, host

if TYPE_CHECKING:
    from afd_patch.config import AFDConfig

_transactions = itertools.count(1)


def patches(config: AFDConfig) -> list[Patch]:
    return [
        Patch(
            name="forward_context.create",
            target="vllm.forward_context:create_forward_context",
            make=host(_with_metadata(config.role)),
            params=("vllm_config", "ubatch_slices", "additional_kwargs"),
            why="the op that calls the FFN reads stage and connector from the forward context",
            upstream="vllm/forward_context.py create_forward_context; set_forward_context looks it up as a global",
            removal="a hook in vLLM that lets plugins add to additional_kwargs on every platform",
        )
    ]


def _with_metadata(role: str) -> Callable[..., Any]:
    def create_forward_context(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from afd_patch.attention import connections

        context = wrapped(*args, **kwargs)
        ubatches = context.ubatch_slices or ()
        metadata = AFDForwardContextMetadata(
            role=role,
            transaction=next(_transactions),
            connector=connections.lookup(context.no_compile_layers),
            stage_count=max(1, len(ubatches)),
            request_slices=tuple(part.request_slice for part in ubatches),
            token_slices=tuple(part.token_slice for part in ubatches),
        )
        # A new dict: the platform's may be shared, and its entries stay.
        context.additional_kwargs = {**context.additional_kwargs, AFD_METADATA: metadata}
        return context

    return create_forward_context
