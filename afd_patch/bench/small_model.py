"""A model small enough to need no vLLM; ``python -m afd_patch.bench.small_model ENDPOINT`` is its FFN server.

A wrong byte in any row of any layer changes the tokens that follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from afd_patch.bench.handoff_calls import identity
from afd_patch.connectors.endpoint import Endpoint, parse_endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.server import FFNServer

LAYERS, HIDDEN, ROWS = 4, 256, 8
_VOCABULARY = 50_000


def ffn(layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Depends on the layer and on every value."""
    return (torch.tanh(rows.float() * (layer + 1.25)) + rows.float() * 0.5).to(rows.dtype)


def generate(connector: RetryingConnector, prompt: int, tokens: int) -> Iterator[int]:
    """``tokens`` numbers, each of which depends on all results before it."""
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(prompt)).to(torch.bfloat16)
    for step in range(tokens):
        for layer in range(LAYERS):
            out = torch.empty_like(rows)
            connector.call(layer, rows, out, transaction=step + 1)
            rows = out
        token = int(rows.view(torch.int16).long().mul(torch.arange(1, HIDDEN + 1)).sum()) % _VOCABULARY
        rows = torch.roll(rows, 1, dims=1) + token / _VOCABULARY
        yield token


def connect(endpoint: Endpoint, timeout: float) -> RetryingConnector:
    """A connector to the server of this model; ``timeout`` seconds for a call."""
    connector = RetryingConnector(
        [endpoint], identity(HIDDEN, ROWS, LAYERS), connect_timeout=60.0, call_timeout=timeout
    )
    connector.connect()
    connector.wait_ready()
    return connector


def main(endpoint: str) -> None:
    torch.set_num_threads(1)
    server = FFNServer(Listener(parse_endpoint(endpoint)), identity(HIDDEN, ROWS, LAYERS))
    print("ready", flush=True)
    server.serve(ffn)


if __name__ == "__main__":
    main(sys.argv[1])
