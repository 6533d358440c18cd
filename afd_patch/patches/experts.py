"""The FFN side of one mixture of experts with ``AFD_GATE=attention``: the native runner, with routing that crossed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from afd_patch.errors import ConnectorError


class Experts(nn.Module):
    """The experts of one layer, run by the native ``runner``, whose router is ``crossed_routing``.

    ``before`` are modules whose results for the same rows the layer adds up, in this order, and the routed one last.
    ``shared_gate`` is the gate of the shared experts, where they are multiplied with it in the attention role.
    """

    def __init__(self, runner: Any, before: list[nn.Module], shared_gate: nn.Module | None) -> None:
        super().__init__()
        self.runner = runner
        self.before = nn.ModuleList(before)
        self.shared_gate = shared_gate
        self.num_experts: int = runner.moe_config.num_experts

    def check(self, routing: torch.Tensor) -> None:
        """Raise ``ConnectorError`` where ``routing`` names an expert that there is not: kernels do not look."""
        least, most = torch.aminmax(routing[:, routing.shape[1] // 2 :])
        if least < 0 or most >= self.num_experts:
            raise ConnectorError(
                f"the routing names experts from {least.item()} to {most.item()}, and there are {self.num_experts}"
            )

    def forward(self, rows: torch.Tensor, routing: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The routed result and, where there are shared experts, theirs, each ``[tokens, hidden]``; then their gate's.

        ``rows`` is ``[tokens, hidden]``; ``routing`` is int32 ``[tokens, 2 * experts per row]``: the bits of the
        experts' weights (float32), and their numbers. It takes the place of the router's logits, which native code
        hands on to the router as they are.
        """
        total = None
        for module in self.before:
            total = module(rows) if total is None else total + module(rows)
        # Below vLLM's op: ``MoERunner._forward_impl`` computes, its ``forward`` would scale and add.
        has_shared = self.runner._shared_experts is not None
        result = self.runner._forward_impl(rows, routing, rows if has_shared else None, None)
        shared, routed = result if has_shared else (None, result)
        if total is not None:
            routed = total + routed
        # Apart: a compiler that puts them side by side itself generates other code for what they end in.
        parts = (routed,) if shared is None else (routed, shared)
        return parts if self.shared_gate is None else (*parts, self.shared_gate(rows)[0])


def crossed_routing(native: Any, top_k: int, num_experts: int) -> Any:
    """A router that returns the routing that it is given; ``native`` is the one that it replaces."""
    return _router_class()(native.routing_method_type, top_k, num_experts)


@cache
def _router_class() -> Any:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    class CrossedRouting(BaseRouter):
        def __init__(self, method: Any, top_k: int, num_experts: int) -> None:
            super().__init__(top_k=top_k, global_num_experts=num_experts)
            self._method = method

        @property
        def routing_method_type(self) -> Any:
            return self._method

        def _compute_routing(
            self, hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: Any, *, input_ids: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, numbers = router_logits.split(self.top_k, dim=1)
            return weights.contiguous().view(torch.float32), numbers.contiguous()

    return CrossedRouting
