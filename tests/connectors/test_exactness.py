"""Rows come back bit for bit as the computation made them, whatever their number, type and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lab import HIDDEN, MAX_ROWS, Server, ask, identity, random_rows, reference

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.errors import ConnectorError

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


@pytest.mark.parametrize("spin", [0.0, 200e-6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bit_for_bit(endpoint: Endpoint, start: Start, connect: Connect, dtype: str, spin: float) -> None:
    who = identity(dtype=dtype)
    start(endpoint, who, spin=spin)
    client = connect(endpoint, who=who, spin=spin)
    for layer, count in enumerate((1, 2, 3, 33, 255, MAX_ROWS)):
        rows = random_rows(count, getattr(torch, dtype))
        before = rows.clone()
        assert torch.equal(ask(client, layer, rows), reference(layer, rows))
        assert torch.equal(rows, before)
    assert client.repeats == 0


def test_values_that_are_no_numbers_cross_too(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint)
    rows = torch.arange(2 * HIDDEN, dtype=torch.int16).mul(517).view(2, HIDDEN).view(torch.bfloat16)
    rows[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    result = ask(client, 1, rows)
    assert torch.equal(result.view(torch.int16), reference(1, rows).view(torch.int16))


@pytest.mark.parametrize("layout", ["every second row", "columns of a wider tensor", "transposed", "expanded"])
def test_rows_that_are_not_contiguous(endpoint: Endpoint, start: Start, connect: Connect, layout: str) -> None:
    start(endpoint)
    client = connect(endpoint)
    rows = {
        "every second row": random_rows(14)[::2],
        "columns of a wider tensor": random_rows(7, width=3 * HIDDEN)[:, HIDDEN : 2 * HIDDEN],
        "transposed": random_rows(HIDDEN, width=7).t(),
        "expanded": random_rows(1).expand(7, HIDDEN),
    }[layout]
    assert not rows.is_contiguous()
    assert torch.equal(ask(client, 2, rows), reference(2, rows))


def test_an_output_that_is_not_contiguous(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint)
    rows = random_rows(5)
    wide = torch.zeros(5, 3 * HIDDEN, dtype=torch.bfloat16)
    client.call(2, rows, wide[:, HIDDEN : 2 * HIDDEN])
    assert torch.equal(wide[:, HIDDEN : 2 * HIDDEN], reference(2, rows))
    assert not wide[:, :HIDDEN].any()
    assert not wide[:, 2 * HIDDEN :].any()


def test_a_result_is_nobody_elses_memory(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint)
    first_rows, second_rows = random_rows(9, seed=1), random_rows(9, seed=2)
    first = ask(client, 0, first_rows)
    kept = first.clone()
    second = ask(client, 0, second_rows)
    assert torch.equal(first, kept)
    second.zero_()  # and writing to it reaches no later result
    assert torch.equal(ask(client, 0, second_rows), reference(0, second_rows))


def test_no_rows_are_no_call(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint)
    assert ask(client, 0, random_rows(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("layer", "rows", "out"),
    [
        (0, random_rows(MAX_ROWS + 1), random_rows(MAX_ROWS + 1)),
        (0, random_rows(2, width=HIDDEN + 1), random_rows(2, width=HIDDEN + 1)),
        (0, random_rows(2, torch.float32), random_rows(2)),
        (0, random_rows(2), random_rows(2, torch.float32)),
        (0, random_rows(2), random_rows(3)),
        (0, random_rows(2)[0], random_rows(2)[0]),
        (8, random_rows(2), random_rows(2)),
        (-1, random_rows(2), random_rows(2)),
        (0, random_rows(2).to(torch.int32), random_rows(2)),
    ],
    ids=[
        "too many",
        "too wide",
        "dtype",
        "reply dtype",
        "out shape",
        "one-dimensional",
        "layer",
        "negative",
        "integers",
    ],
)
def test_a_call_that_was_not_agreed_fails_at_once(
    endpoint: Endpoint, start: Start, connect: Connect, layer: int, rows: torch.Tensor, out: torch.Tensor
) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    with pytest.raises(ConnectorError, match=f"layer {layer}.* up to {MAX_ROWS} x {HIDDEN} bfloat16 rows of 8 layers"):
        client.call(layer, rows, out)
    good = random_rows(4)
    assert torch.equal(ask(client, 3, good), reference(3, good))
    assert client.repeats == 0
    assert not server.lines("dropped")
