"""The product's side of ``bench handoff``: an FFN server that computes nothing, the connector to it, and the op.

Knows torch, and vLLM where the op is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from afd_patch.bench.report import core_set
from afd_patch.connectors.endpoint import parse_endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.server import FFNServer
from afd_patch.identity import Identity

_LAYER = 0


def identity(hidden: int, max_rows: int, layers: int = 1) -> Identity:
    """What both sides of a benchmark without a model announce."""
    return Identity(
        vllm="bench", model="bench", weights="bench", architecture="Bench", boundary="bench", gate="ffn",
        dtype="bfloat16", hidden_size=hidden, request_columns=hidden, reply_columns=hidden,
        layers=layers, compiled=False, max_rows=max_rows,
    )  # fmt: skip


def serve_identity(endpoint: str, hidden: int, max_rows: int, spin_us: int, cores: str) -> None:
    """Answer every call with its own rows, until killed."""
    torch.set_num_threads(len(core_set(cores)))
    listener = Listener(parse_endpoint(endpoint))
    FFNServer(listener, identity(hidden, max_rows), spin_us * 1e-6).serve(lambda layer, rows: rows)


class NativeFFN(nn.Module):
    """Stands for a native FFN class; the stand-in is made for it as for any other."""


class Caller:
    """A connection to ``serve_identity`` and, with ``op``, a forward of vLLM that uses it."""

    def __init__(self, endpoint: str, hidden: int, max_rows: int, spin_us: int, cores: str, *, op: bool) -> None:
        self._hidden = hidden
        self._stack = ExitStack()
        self._stack.enter_context(torch.inference_mode())
        threads = torch.get_num_threads()
        self._stack.callback(torch.set_num_threads, threads)
        self._connector = RetryingConnector(
            [parse_endpoint(endpoint)], identity(hidden, max_rows), connect_timeout=60.0, call_timeout=30.0,
            spin=spin_us * 1e-6,
        )  # fmt: skip
        self._stack.callback(self._connector.close)
        try:
            if op:
                self._enter_forward(endpoint)
            torch.set_num_threads(len(core_set(cores)))
            self._connector.connect()
            self._connector.wait_ready()
        except BaseException:
            self._stack.close()
            raise

    def _enter_forward(self, endpoint: str) -> None:
        """A real forward context of a process with the attention role, without a model."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import afd_patch

        self._stack.enter_context(afd_patch.activated(role="attention", ffn=[endpoint]))
        from vllm.config import VllmConfig
        from vllm.forward_context import set_forward_context

        from afd_patch.attention import connections
        from afd_patch.attention.proxy import make_remote

        config = VllmConfig()
        connections.bind(config.compilation_config.static_forward_context, self._connector)
        self._stack.enter_context(set_forward_context(None, config, num_tokens=1))
        self._proxy = make_remote(NativeFFN(), _LAYER)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def connector_call(self, count: int) -> Callable[[], None]:
        """One call of the connector with ``count`` rows, into memory that exists."""
        rows, call = self._rows(count), self._connector.call
        out = torch.empty_like(rows)
        call(_LAYER, rows, out)
        assert torch.equal(rows, out)
        return lambda: call(_LAYER, rows, out)

    def op_call(self, count: int) -> Callable[[], None]:
        """One call of the stand-in for a layer's FFN, which allocates its result as a native FFN does."""
        rows, proxy = self._rows(count), self._proxy
        assert torch.equal(rows, proxy(rows))
        return lambda: proxy(rows)

    def _rows(self, count: int) -> torch.Tensor:
        return torch.randn(count, self._hidden).to(torch.bfloat16)
