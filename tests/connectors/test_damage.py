"""A network that turns bits over, in both directions and everywhere: a call is right or repeated, and never refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes import Damage, FakePeer, FakeServer, Filter, Proxy
from lab import FAILS, HIDDEN, Server, ask, assert_right, connector, eventually, free_endpoint, random_rows, reference
from raw import Raw, framed

from afd_patch.connectors import retry
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import HEADER_SIZE, DType, Header, Kind, text_frame
from afd_patch.errors import RemoteFFNError

Start = Callable[..., Server]
#: Connections that are garbled; the ones after them are left alone.
CONNECTIONS = 1000
#: The rows of a call in ``test_damage_everywhere``.
MOST = 12


@pytest.fixture
def way(endpoint: Endpoint, folder: Path) -> Endpoint:
    return free_endpoint(endpoint.kind, folder, "way")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_PAUSE", 0.001)


def damage(seed: int, spread: int) -> tuple[Damage, ...]:
    return tuple(Damage(seed * 100_003 + number, spread) for number in range(CONNECTIONS))


# The handshake has some 450 bytes each way, a call of 1 to 12 rows 64 and over TCP up to 1536 more.
@pytest.mark.parametrize("spread", [1500, 4000, 15_000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_damage_everywhere(endpoint: Endpoint, way: Endpoint, start: Start, seed: int, spread: int) -> None:
    server = start(endpoint, frame_timeout=1.0)
    bystander = server.client()
    requests, replies = damage(seed, spread), damage(seed + 50, spread)
    with Proxy(way, endpoint, replies, requests) as proxy:
        client = connector(way, call_timeout=30.0, connect_timeout=30.0)
        client.connect()
        for call in range(50):
            layer, rows = call % 6, random_rows(1 + call * 7 % MOST, seed=seed * 1000 + call)
            assert torch.equal(ask(client, layer, rows), reference(layer, rows)), call
        client.close()
        used = proxy.accepted
    assert used < CONNECTIONS, "the last calls had no damage"
    hits = sum(len(filter_.hits) for filter_ in (*requests, *replies))
    assert hits >= used - 1  # no connection ends without
    assert used > 2 or spread > 1500
    assert_right(bystander)
    assert bystander.repeats == 0
    assert not server.lines("Traceback")
    assert not server.lines("defect")
    bystander.close()


def in_byte(place: int, bit: int) -> Filter:
    def filter_(offset: int, data: bytes) -> bytes:
        at = place - offset
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]

    return filter_


@pytest.mark.parametrize("way_back", [True, False], ids=["WELCOME", "HELLO"])
def test_every_byte_of_a_handshake(endpoint: Endpoint, way: Endpoint, start: Start, way_back: bool) -> None:
    """Wherever the damage is, nobody says that the two do not belong together, and the next attempt is right."""
    server = start(endpoint)
    hello = {"identity": server.identity.to_json()}
    size = len(text_frame(Kind.WELCOME, {"ready": True, **hello}) if way_back else text_frame(Kind.HELLO, hello))
    garbled = tuple(in_byte(place, place % 8) for place in range(size))
    with Proxy(way, endpoint, *((garbled, ()) if way_back else ((), garbled))) as proxy:
        client = connector(way, connect_timeout=60.0)
        client.connect()
        assert proxy.accepted == size + 1
        assert_right(client)
        client.close()
    assert not server.lines("here, ")
    assert not server.lines("handshake is")  # no text is read before its check


@pytest.mark.parametrize("seed", range(4))
def test_an_error_that_is_damaged_is_asked_for_again(
    endpoint: Endpoint, way: Endpoint, start: Start, seed: int
) -> None:
    server = start(endpoint)
    welcome = len(text_frame(Kind.WELCOME, {"ready": True, "identity": server.identity.to_json()}))
    replies = tuple(in_byte(welcome + place, seed * 2) for place in range(seed, HEADER_SIZE + 20, 4))
    with Proxy(way, endpoint, replies):
        client = connector(way)
        client.connect()
        with pytest.raises(RemoteFFNError, match=f"layer {FAILS}: RuntimeError: no such expert"):
            ask(client, FAILS, random_rows(3))
        assert client.repeats == len(replies)
        client.close()
    server.log_file.write_text("")  # with a stack trace for every one of them


def test_a_ready_that_is_damaged_is_asked_for_again(endpoint: Endpoint, way: Endpoint, start: Start) -> None:
    server = start(endpoint, loading=True)
    welcome = len(text_frame(Kind.WELCOME, {"ready": False, "identity": server.identity.to_json()}))
    with Proxy(way, endpoint, tuple(in_byte(welcome + place, 3) for place in (16, 60))):
        client = connector(way)
        client.connect()
        server.finish_loading()
        client.wait_ready()
        assert_right(client)
        client.close()


@pytest.mark.parametrize("place", [0, 7, 8, 2 * HIDDEN * 3 - 1])
def test_damaged_rows_are_not_computed(tcp: Endpoint, start: Start, place: int) -> None:
    server = start(tcp)
    peer = Raw(tcp)
    peer.welcome()
    payload = random_rows(3).view(torch.uint8).numpy().tobytes()
    call = Header(Kind.CALL, peer.session, dtype=DType.BFLOAT16, rows=3, width=HIDDEN)
    frame = bytearray(framed(call, payload))
    frame[HEADER_SIZE + place] ^= 1
    peer.say(frame)
    assert peer.rest() == b""
    (line,) = server.wait_for_line("dropped")
    assert line.endswith("the payload was damaged on its way: its checksum is wrong")
    assert_right(server.client(), rounds=1)


@pytest.mark.parametrize("contiguous", [True, False])
def test_damaged_results_do_not_end_the_call(tcp: Endpoint, contiguous: bool) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        if peer.number < 2:
            reply = bytearray(peer.reply(*peer.read_call()))
            reply[-1 - peer.number] ^= 0x40
            peer.say(reply)
            peer.wait_until_closed()
        peer.serve()

    with FakeServer(tcp, script):
        client = connector(tcp)
        client.connect()
        rows = random_rows(5)
        out = torch.zeros(5, HIDDEN if contiguous else 2 * HIDDEN, dtype=rows.dtype)[:, :HIDDEN]
        client.call(2, rows, out)
        assert torch.equal(out, reference(2, rows))
        assert client.repeats == 2
        client.close()


def test_damage_is_logged_once_and_says_what_it_is(tcp: Endpoint, folder: Path, start: Start) -> None:
    server = start(tcp)
    hello = len(text_frame(Kind.HELLO, {"identity": server.identity.to_json()}))
    way = free_endpoint("tcp", folder)
    with Proxy(way, tcp, requests=(in_byte(30, 0), in_byte(80, 0), in_byte(hello + 30, 0), in_byte(hello + 80, 0))):
        client = connector(way)
        client.connect()
        assert_right(client)
        client.close()
    assert eventually(lambda: len(server.lines("dropped")) == 4)
    assert [line.partition(" was damaged")[0].rpartition("the ")[2] for line in server.lines("dropped")] == [
        "header", "payload", "header", "payload",
    ]  # fmt: skip
