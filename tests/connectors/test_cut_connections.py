"""Networks that cut, delay, truncate and garble: a result is right or there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes import Proxy, cut, flip, swallow
from lab import Server, ask, assert_right, connector, free_endpoint, random_rows, reference

from afd_patch.connectors import client as client_module
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import HEADER_SIZE, Header, Kind, text_frame
from afd_patch.errors import ConnectorError

Start = Callable[..., Server]
ROWS = random_rows(300)  # several segments


def crumble(offset: int, data: bytes) -> bytes:
    """Makes the reader see small pieces."""
    time.sleep(0.0002)
    return data


def welcome_size(server: Server) -> int:
    """Bytes of the answer to a handshake: where the stream of replies begins."""
    return len(text_frame(Kind.WELCOME, {"ready": True, "identity": server.identity.to_json()}))


def hello_size(server: Server) -> int:
    """Bytes of a handshake: where the stream of calls begins."""
    return len(text_frame(Kind.HELLO, {"identity": server.identity.to_json()}))


@pytest.fixture
def way(folder: Path) -> Endpoint:
    return free_endpoint("tcp", folder)


@pytest.mark.parametrize("into", [0, 1, 63, 64, 65, 20_000])
def test_cut_in_a_reply(tcp: Endpoint, way: Endpoint, start: Start, into: int) -> None:
    server = start(tcp)
    with Proxy(way, tcp, replies=(cut(welcome_size(server) + into),)) as proxy:
        client = connector(way)
        client.connect()
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert (client.repeats, proxy.accepted) == (1, 2)
        client.close()


@pytest.mark.parametrize("into", [1, 64, 65, 20_000])
def test_cut_in_a_request(tcp: Endpoint, way: Endpoint, start: Start, into: int) -> None:
    server = start(tcp)
    with Proxy(way, tcp, requests=(cut(hello_size(server) + into),)) as proxy:
        client = connector(way)
        client.connect()
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert (client.repeats, proxy.accepted) == (1, 2)
        client.close()
    assert_right(server.client())


@pytest.mark.parametrize("place", [0, 1, 64, 100])
def test_cut_in_the_handshake(tcp: Endpoint, way: Endpoint, start: Start, place: int) -> None:
    start(tcp)
    with Proxy(way, tcp, replies=(cut(place), cut(place))) as proxy:
        client = connector(way)
        client.connect()
        assert_right(client)
        assert proxy.accepted == 3
        client.close()


def test_cut_again_and_again(tcp: Endpoint, way: Endpoint, start: Start) -> None:
    """Every connection breaks after a few calls; no result is lost or wrong."""
    server = start(tcp)
    size = welcome_size(server) + 3 * (HEADER_SIZE + ROWS.nbytes) + 1000
    with Proxy(way, tcp, replies=(cut(size),) * 50):
        client = connector(way)
        client.connect()
        for seed in range(24):
            rows = random_rows(300, seed=seed)
            assert torch.equal(ask(client, seed % 6, rows), reference(seed % 6, rows))
        assert client.repeats >= 5
        client.close()


@pytest.mark.parametrize("into", [0, 30, 64, 1000])
def test_a_line_that_goes_silent(tcp: Endpoint, way: Endpoint, start: Start, into: int) -> None:
    server = start(tcp)
    with Proxy(way, tcp, replies=(swallow(welcome_size(server) + into),)):
        client = connector(way, call_timeout=0.6)
        client.connect()
        began = time.monotonic()
        with pytest.raises(ConnectorError, match=r"layer 2: .* within 0\.6 s") as error:
            ask(client, 2, ROWS)
        assert str(way) in str(error.value)
        assert time.monotonic() - began < 1.6
        assert_right(client)
        client.close()


@pytest.mark.parametrize("into", [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1000])
def test_a_reply_that_stops_half_way_is_asked_for_again(
    tcp: Endpoint, way: Endpoint, start: Start, into: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HANDSHAKE_TIMEOUT", 0.3)
    server = start(tcp)
    with Proxy(way, tcp, replies=(swallow(welcome_size(server) + into),)):
        client = connector(way)
        client.connect()
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert client.repeats == 1
        client.close()


def test_a_reply_that_drips_ends_with_the_call_timeout(tcp: Endpoint, way: Endpoint, start: Start) -> None:
    """Progress is no reason to wait longer than was asked for."""
    server = start(tcp)

    def drip(offset: int, data: bytes) -> bytes:
        if offset < welcome_size(server):
            return data
        time.sleep(0.1)
        return data[:1]

    with Proxy(way, tcp, replies=(drip,)):
        client = connector(way, call_timeout=0.6)
        client.connect()
        began = time.monotonic()
        with pytest.raises(ConnectorError, match=r"within 0\.6 s"):
            ask(client, 2, ROWS)
        assert time.monotonic() - began < 2.5
        client.close()


#: Where every field of a header begins.
FIELDS = {
    "magic": 0, "version": 4, "kind": 6, "dtype": 7, "flags": 8, "layer": 12, "stage": 14, "session": 16,
    "transaction": 24, "call": 32, "rows": 40, "width": 44, "payload": 48, "check": 56, "checksum": 60,
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("way_back", [True, False], ids=["reply", "request"])
def test_a_garbled_header_is_never_believed(
    tcp: Endpoint, way: Endpoint, start: Start, field: str, way_back: bool
) -> None:
    server = start(tcp, frame_timeout=0.3)
    garble = flip((welcome_size(server) if way_back else hello_size(server)) + FIELDS[field])
    with Proxy(way, tcp, replies=(garble,) if way_back else (), requests=() if way_back else (garble,)):
        client = connector(way)
        client.connect()
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert client.repeats == 1
        client.close()
    assert_right(server.client())


def test_small_pieces(tcp: Endpoint, way: Endpoint, start: Start) -> None:
    start(tcp)
    with Proxy(way, tcp, replies=(crumble,), requests=(crumble,)):
        client = connector(way)
        client.connect()
        assert_right(client)
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert client.repeats == 0
        client.close()


def test_the_fields_are_where_this_file_says() -> None:
    assert len(FIELDS) == len(Header._fields) + 3
