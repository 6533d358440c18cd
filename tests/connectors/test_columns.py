"""Side columns: what crosses beside a row arrives bit for bit, and both widths are what the handshake promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import HIDDEN, MAX_ROWS, Server, identity, random_routing, random_rows, reference, routed
from raw import Raw

from afd_patch.connectors import columns, shared_memory, wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.errors import ConnectorError
from afd_patch.identity import Identity

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]
TOP_K = 3
ROW_DTYPES = ("bfloat16", "float16", "float32")


def routing_identity(dtype: str = "bfloat16", **changes: Any) -> Identity:
    side = columns.columns_for(2 * TOP_K, 4, getattr(torch, dtype).itemsize)
    return identity(
        **{
            "gate": "attention",
            "dtype": dtype,
            "request_columns": HIDDEN + side,
            "reply_columns": 2 * HIDDEN,
            **changes,
        }
    )


def ask(client: RetryingConnector, layer: int, rows: torch.Tensor, side: Any) -> torch.Tensor:
    out = torch.full((len(rows), 2 * HIDDEN), float("nan"), dtype=rows.dtype)
    client.call(layer, rows, out, side=side)
    return out


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_every_bit_pattern_survives(dtype: str) -> None:
    """Among the numbers are the bits of infinities and of every kind of NaN of the row dtype."""
    rows = random_rows(4096, getattr(torch, dtype))
    numbers = torch.arange(-(2**31), 2**31, 2**17, dtype=torch.int64).to(torch.int32).view(4096, 8)
    weights = torch.arange(2**30, 2**30 + 4096 * 8, dtype=torch.int32).view(4096, 8).mul(131).view(torch.float32)
    request = columns.joined(rows, (weights, numbers))
    assert request.shape == (4096, columns.width_of(rows, (weights, numbers)))
    hidden, side = columns.split(request, HIDDEN, torch.int32)
    assert torch.equal(hidden, rows)
    assert torch.equal(side, torch.cat([weights.view(torch.int32), numbers], 1))


def test_one_row_is_a_copy_with_the_strides_of_a_new_tensor() -> None:
    request = columns.joined(random_rows(1), random_routing(1))
    hidden, side = columns.split(request, HIDDEN, torch.int32)
    assert (hidden.stride(), side.stride()) == ((HIDDEN, 1), (2 * TOP_K, 1))
    hidden.zero_()
    assert request[:, :HIDDEN].any()


def test_values_that_fill_no_whole_columns() -> None:
    assert columns.columns_for(3, 2, 2) == 3
    with pytest.raises(ValueError, match="3 values of 2 bytes fill no whole columns of 4 bytes"):
        columns.columns_for(3, 2, 4)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_bit_for_bit(endpoint: Endpoint, start: Start, connect: Connect, dtype: str) -> None:
    who = routing_identity(dtype)
    start(endpoint, who)
    client = connect(endpoint, who=who)
    for layer, count in enumerate((1, 2, 33, MAX_ROWS)):
        rows, side = random_rows(count, getattr(torch, dtype)), random_routing(count, TOP_K)
        before = [part.clone() for part in (rows, *side)]
        assert torch.equal(ask(client, layer, rows, side), routed(layer, rows, *side))
        assert all(torch.equal(part, old) for part, old in zip((rows, *side), before, strict=True))
    assert client.repeats == 0


def test_a_prefill_of_16384_rows(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    who = routing_identity(max_rows=16384)
    start(endpoint, who)
    rows, side = random_rows(16384), random_routing(16384, TOP_K)
    assert torch.equal(ask(connect(endpoint, who=who), 1, rows, side), routed(1, rows, *side))


def test_side_columns_that_are_not_contiguous(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    who = routing_identity()
    start(endpoint, who)
    weights, numbers = random_routing(TOP_K, 5)
    side = (weights.t(), numbers.t())
    assert not any(part.is_contiguous() for part in side)
    rows = random_rows(5)
    assert torch.equal(ask(connect(endpoint, who=who), 1, rows, side), routed(1, rows, *side))


def test_the_two_areas_differ_in_size() -> None:
    who = routing_identity(max_rows=4096)
    assert shared_memory.file_bytes(who) == 4096 * ((HIDDEN + 4 * TOP_K) + 2 * HIDDEN) * 2


@pytest.mark.parametrize(
    ("rows", "side", "width"),
    [
        (random_rows(2), (), 2 * HIDDEN),
        (random_rows(2), random_routing(2, TOP_K)[:1], 2 * HIDDEN),
        (random_rows(2), random_routing(2, TOP_K + 1), 2 * HIDDEN),
        (random_rows(2), random_routing(3, TOP_K), 2 * HIDDEN),
        (random_rows(2), random_routing(2, TOP_K), HIDDEN),
        (random_rows(2, width=HIDDEN + 4 * TOP_K), (), 2 * HIDDEN),
    ],
    ids=["nothing beside", "weights only", "more experts", "other rows beside", "a narrow output", "one wide row"],
)
def test_a_call_that_was_not_agreed_fails_at_once(
    endpoint: Endpoint, start: Start, connect: Connect, rows: torch.Tensor, side: Any, width: int
) -> None:
    who = routing_identity()
    server = start(endpoint, who)
    client = connect(endpoint, who=who)
    with pytest.raises(ConnectorError, match=f"{HIDDEN + 4 * TOP_K} columns with what crosses beside them"):
        client.call(1, rows, torch.empty(len(rows), width, dtype=torch.bfloat16), side=side)
    good, routing = random_rows(4), random_routing(4, TOP_K)
    assert torch.equal(ask(client, 1, good, routing), routed(1, good, *routing))
    assert client.repeats == 0
    assert not server.lines("dropped")


def test_a_call_of_the_other_width_is_dropped(tcp: Endpoint, start: Start) -> None:
    who = routing_identity()
    server = start(tcp, who)
    peer = Raw(tcp)
    peer.welcome(who)
    peer.say(Header(Kind.CALL, peer.session, dtype=DType.BFLOAT16, rows=1, width=HIDDEN, payload=2 * HIDDEN).pack())
    assert peer.rest() == b""
    (line,) = server.wait_for_line("dropped")
    assert f"rows of {HIDDEN}, {HIDDEN + 4 * TOP_K} were agreed" in line
    client = server.client()
    rows, side = random_rows(3), random_routing(3, TOP_K)
    assert torch.equal(ask(client, 2, rows, side), routed(2, rows, *side))


def test_a_router_elsewhere_is_refused(tcp: Endpoint, start: Start) -> None:
    """The widths are part of the handshake, so rows without routing never reach experts that need it."""
    start(tcp, routing_identity())
    peer = Raw(tcp)
    peer.hello(identity())
    header, body = peer.frame()
    assert header.kind is Kind.REFUSE
    assert b"request_columns" in body
    assert wire.parse_text(header, memoryview(body))["reason"].count("gate") == 1


def test_rows_alone_are_unchanged(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    rows, out = random_rows(7), torch.empty(7, HIDDEN, dtype=torch.bfloat16)
    connect(endpoint).call(3, rows, out, side=())
    assert torch.equal(out, reference(3, rows))
