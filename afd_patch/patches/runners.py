"""Finds vLLM's runner inside of a mixture of experts, for builds that cut through it, and says why it cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

#: What is used of vLLM's ``SharedExperts``.
_SHARED = ("_layer", "_output", "_output_idx", "maybe_forward_async", "output")


class NotCuttable(Exception):
    """The message is a reason, as the middle of a sentence."""


def find_runner(block: nn.Module, uses: Iterable[str]) -> Any:
    """The native ``MoERunner`` of ``block``.

    Raises ``NotCuttable`` where there is none, or where it lacks one of the names ``uses``, or its shared experts do.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners: list[Any] = [child for child in block.children() if isinstance(child, MoERunner)]
    if len(runners) != 1:
        raise NotCuttable(f"{type(block).__name__} has {len(runners)} runners of experts, not one")
    (runner,) = runners
    lacking = [name for name in uses if not hasattr(runner, name)]
    shared = getattr(runner, "_shared_experts", None)
    lacking += [name for name in _SHARED if shared is not None and name not in dir(shared)]
    if lacking:
        raise NotCuttable(f"the runner of experts of this vLLM, or its shared experts, have no {', '.join(lacking)}")
    return runner


def require_own_rows(runner: Any, hidden: int) -> None:
    """Raise ``NotCuttable`` where the experts are not given rows of ``hidden`` elements as they are."""
    if runner.routed_input_transform is not None or runner.routed_output_transform is not None:
        raise NotCuttable("its rows are transformed around the experts")
    if runner.moe_config.hidden_dim != hidden:
        raise NotCuttable("the kernel of its experts pads the rows")


def require_ending(shared: Any, names: Iterable[str]) -> None:
    """Raise ``NotCuttable`` where the shared experts ``shared`` lack one of the modules that they should end in."""
    lacking = [name for name in names if getattr(shared, name, None) is None]
    if lacking:
        raise NotCuttable(f"{type(shared).__name__} has no {', '.join(lacking)}")


def take_gate(shared: Any, ending: tuple[str, str]) -> nn.Module:
    """The gate of the native shared experts, which then do without it."""
    gate: nn.Module = getattr(shared, ending[1])
    setattr(shared, ending[1], None)
    return gate
