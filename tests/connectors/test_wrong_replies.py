"""Replies that belong to something else are never applied: late ones, doubled ones, those of another call."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from fakes import FakePeer, FakeServer
from lab import HIDDEN, MAX_ROWS, ask, assert_right, connector, random_rows, reference
from raw import framed

from afd_patch.connectors import wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import DType, Kind
from afd_patch.errors import ConnectorError, RemoteFFNError

ROWS = random_rows(5)

WRONG: dict[str, dict[str, Any]] = {
    "kind": {"kind": Kind.CALL},
    "ready instead": {"kind": Kind.READY},
    "session": {"session": 99},
    "transaction": {"transaction": 7},
    "call": {"call": 0},
    "layer": {"layer": 3},
    "stage": {"stage": 1},
    "dtype": {"dtype": DType.FLOAT16},
    "rows": {"rows": 4},
    "width": {"width": HIDDEN * 2},
    "flags": {"flags": wire.FLAG_SHARED_MEMORY},
    "unknown flags": {"flags": 1 << 31},
    "payload": {"payload": 5 * HIDDEN * 2 - 2},
    "a payload of 4 GiB": {"payload": 4 << 30},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_reply_with_a_wrong_field_is_not_applied(tcp: Endpoint, what: str) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        if peer.number == 0:
            header, rows = peer.read_call()
            peer.say(peer.reply(header, torch.ones_like(rows), **WRONG[what]))
            peer.wait_until_closed()
        peer.serve()

    with FakeServer(tcp, script):
        client = connector(tcp)
        client.connect()
        assert torch.equal(ask(client, 2, ROWS), reference(2, ROWS))
        assert client.repeats == 1
        client.close()


@pytest.mark.parametrize("what", WRONG)
def test_wrong_replies_for_ever_end_with_the_call_timeout(tcp: Endpoint, what: str) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        header, rows = peer.read_call()
        peer.say(peer.reply(header, torch.ones_like(rows), **WRONG[what]))
        peer.wait_until_closed()

    with FakeServer(tcp, script):
        client = connector(tcp, call_timeout=0.15)
        client.connect()
        out = torch.full_like(ROWS, 5.0)
        with pytest.raises(ConnectorError, match=r"layer 2: .* within 0\.15 s") as error:
            client.call(2, ROWS, out)
        assert str(tcp) in str(error.value)
        assert (out == 5.0).all()  # not even in part
        client.close()


def test_a_doubled_reply_is_not_taken_for_the_next(tcp: Endpoint) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        while True:
            reply = peer.reply(*peer.read_call())
            peer.say(reply, reply)

    with FakeServer(tcp, script):
        client = connector(tcp)
        client.connect()
        for seed in range(6):  # the same layer and the same number of rows every time
            rows = random_rows(5, seed=seed)
            assert torch.equal(ask(client, 2, rows), reference(2, rows))
        assert client.repeats >= 2
        client.close()


def test_a_late_reply_is_not_taken_for_the_next(tcp: Endpoint) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        header, rows = peer.read_call()
        if peer.number == 0:
            time.sleep(0.4)  # later than the call's limit
        peer.say(peer.reply(header, rows))
        peer.serve()

    with FakeServer(tcp, script):
        client = connector(tcp, call_timeout=0.2)
        client.connect()
        with pytest.raises(ConnectorError, match="within"):
            ask(client, 2, random_rows(5, seed=1))
        for seed in range(2, 6):
            rows = random_rows(5, seed=seed)
            assert torch.equal(ask(client, 2, rows), reference(2, rows))
        client.close()


def test_an_interrupted_call_leaves_no_reply_behind(tcp: Endpoint) -> None:
    """What a signal handler raises in the middle of a call (Ctrl-C) ends its connection too."""
    main = threading.get_ident()

    def script(peer: FakePeer) -> None:
        peer.welcome()
        header, rows = peer.read_call()
        if peer.number == 0:
            signal.pthread_kill(main, signal.SIGINT)
            peer.wait_until_closed()
        peer.say(peer.reply(header, rows))
        peer.serve()

    with FakeServer(tcp, script):
        client = connector(tcp)
        client.connect()
        with pytest.raises(KeyboardInterrupt):
            ask(client, 2, random_rows(5, seed=1))
        assert_right(client)
        client.close()


def test_an_error_for_another_call_is_not_this_ones(tcp: Endpoint) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        if peer.number == 0:
            header, _ = peer.read_call()
            peer.say(wire.text_frame(Kind.ERROR, {"reason": "old"}, session=peer.session, call=header.call + 1))
            peer.wait_until_closed()
        peer.serve()

    with FakeServer(tcp, script):
        client = connector(tcp)
        client.connect()
        assert_right(client)
        assert client.repeats == 1
        client.close()


@pytest.mark.parametrize(
    "body", [b"[" * 60_000, b"\xff" * 10, b"[]", b'{"a":1}'], ids=["deep", "no text", "list", "other"]
)
def test_an_error_without_a_proper_reason(tcp: Endpoint, body: bytes) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        header, _ = peer.read_call()
        peer.say(framed(header._replace(kind=Kind.ERROR), body))
        peer.wait_until_closed()

    with FakeServer(tcp, script):
        client = connector(tcp, call_timeout=0.15)
        client.connect()
        with pytest.raises(ConnectorError) as error:
            ask(client, 2, ROWS)
        assert isinstance(error.value, RemoteFFNError) == (body[:1] == b"{")
        client.close()


@pytest.mark.parametrize("size", [wire.MAX_TEXT + 1, 4 << 30, 2**64 - 1])
def test_a_text_of_any_size_is_not_allocated(tcp: Endpoint, size: int) -> None:
    def script(peer: FakePeer) -> None:
        peer.say(wire.Header(Kind.WELCOME, payload=size).pack())
        peer.wait_until_closed()

    with FakeServer(tcp, script), pytest.raises(ConnectorError, match=f"announced {size} bytes"):
        connector(tcp, connect_timeout=0.2).connect()


def test_more_rows_than_fit_are_never_received(tcp: Endpoint) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        header, _ = peer.read_call()
        peer.say(peer.reply(header, random_rows(MAX_ROWS), rows=MAX_ROWS))
        peer.wait_until_closed()

    with FakeServer(tcp, script):
        client = connector(tcp, call_timeout=0.15)
        client.connect()
        with pytest.raises(ConnectorError, match="belongs to another call"):
            ask(client, 2, ROWS)
        client.close()
