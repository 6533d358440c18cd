"""Compiling one layer's FFN the way the stock model would compile it.

With ``torch.compile`` on, stock vLLM rounds differently from eager mode, because fused operations keep more digits. So
the FFN role compiles too, with the same backend and options, one graph a layer, and before the first call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Rows of the example that graphs are traced with; sizes 0 and 1 would be frozen.
EXAMPLE_ROWS = 16


def compile_layer(
    module: nn.Module, layer: int, vllm_config: Any
) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """``module`` compiled for any number of rows; the first call does the work.

    Guards are dropped, as stock vLLM does, so that one row runs the same graph as many. A function without guards
    must have a code object of its own, because Dynamo's cache is looked up by code object: all layers share the class.
    """

    def run(*rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        result: torch.Tensor | tuple[torch.Tensor, ...] = module(*rows)
        return result

    own = types.FunctionType(
        run.__code__.replace(co_name=f"ffn_layer_{layer}"), run.__globals__, run.__name__, None, run.__closure__
    )
    compilation = vllm_config.compilation_config
    backend = compilation.init_backend(vllm_config)
    options = dict(compilation.inductor_compile_config) if backend == "inductor" else {}
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=options)
