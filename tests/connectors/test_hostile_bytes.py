"""Bytes that no attention process sends cost their sender the connection and one log line, and nobody else a thing.

One server gets all of it, one after the other, as it would in its life.
"""

from __future__ import annotations

import json
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lab import HIDDEN, LAYERS, MAX_ROWS, Server, assert_right, eventually, free_endpoint, identity
from raw import Raw, framed, sealed

from afd_patch.connectors import wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import DType, Header, Kind

Start = Callable[..., Server]


@pytest.fixture(scope="module", params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="afd-") as folder:
        server = Server(free_endpoint(request.param, Path(folder)), Path(folder), frame_timeout=0.35)
        yield server
        server.kill()


@pytest.fixture
def endpoint(server: Server) -> Endpoint:
    return server.endpoint


@pytest.fixture
def bystander(server: Server) -> Iterator[RetryingConnector]:
    """A good peer that is served before and after, over one connection, by a server that keeps nothing of the other."""
    client = server.client()
    assert_right(client)
    fds, areas, rss = server.fds(), server.shared_areas(), server.rss()
    server.forget_log()
    yield client
    assert_right(client)
    assert client.repeats == 0
    assert eventually(lambda: server.fds() == fds), (server.fds(), fds)
    assert server.shared_areas() == areas
    assert server.rss() - rss < 8 << 20
    (line,) = server.log()
    assert " dropped: " in line
    assert len(line) < 1000
    client.close()
    server.wait_for_line("left after 6 calls")


def reason(server: Server) -> str:
    """What the server logged of the only peer it dropped."""
    (line,) = server.wait_for_line("dropped")
    return line.partition(" dropped: ")[2]


def hello(content: object) -> bytes:
    body = json.dumps(content).encode()
    return framed(Header(Kind.HELLO), body)


def replaced(frame: bytes, place: int, value: int) -> bytes:
    return frame[:place] + bytes([value]) + frame[place + 1 :]


IDENTITY = identity().to_json()
DEEP = b'{"identity":' * 5000 + b"1" + b"}" * 5000

FIRST_BYTES: dict[str, bytes] = {
    "pickle": pickle.dumps({"identity": IDENTITY}) + b"x" * 64,
    "TLS": bytes.fromhex("1603010200010001fc0303") + b"\0" * 64,
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": b"\0" * 4096,
    "a long line": b"a" * 1_000_000,
    "HELLO of 4 GiB": Header(Kind.HELLO, payload=4 << 30).pack(),
    "HELLO of 2**64-1": Header(Kind.HELLO, payload=2**64 - 1).pack(),
    "HELLO just too long": Header(Kind.HELLO, payload=wire.MAX_TEXT + 1).pack(),
    "empty HELLO": Header(Kind.HELLO).pack(),
    "CALL first": Header(Kind.CALL, dtype=DType.BFLOAT16, rows=1, width=HIDDEN, payload=2 * HIDDEN).pack(),
    "CALL of 4 GiB first": Header(Kind.CALL, dtype=DType.BFLOAT16, rows=1, width=HIDDEN, payload=4 << 30).pack(),
    "WELCOME first": wire.text_frame(Kind.WELCOME, {"ready": True}),
    "old version": sealed(replaced(hello({"identity": IDENTITY}), 4, 0)),
    "unknown kind": sealed(replaced(hello({"identity": IDENTITY}), 6, 0x63)),
    "no JSON": framed(Header(Kind.HELLO), b"\xff\x00{}"),
    "JSON list": hello([IDENTITY]),
    "JSON nested": framed(Header(Kind.HELLO), DEEP),
    "JSON brackets": framed(Header(Kind.HELLO), b"[" * 60_000),
    "JSON of a huge number": framed(Header(Kind.HELLO), b"9" * 60_000),
    "damaged header": replaced(hello({"identity": IDENTITY}), 6, 0x63),
    "damaged payload": hello({"identity": IDENTITY})[:-9] + b"x" * 9,
    "no identity": hello({}),
    "identity is a list": hello({"identity": [1, 2]}),
    "identity is text": hello({"identity": "x" * 60_000}),
    "identity is nested": hello({"identity": {**IDENTITY, "vllm": json.loads("[" * 300 + "]" * 300)}}),
    "identity is NaN": hello({"identity": float("nan")}),
    "max_rows is negative": hello({"identity": {**IDENTITY, "max_rows": -1}}),
    "max_rows is 0": hello({"identity": {**IDENTITY, "max_rows": 0}}),
    "max_rows is 10**12": hello({"identity": {**IDENTITY, "max_rows": 10**12}}),
    "max_rows is 10**4000": hello({"identity": {**IDENTITY, "max_rows": 10**4000}}),
    "max_rows is NaN": hello({"identity": {**IDENTITY, "max_rows": float("nan")}}),
    "max_rows is true": hello({"identity": {**IDENTITY, "max_rows": True}}),
    "hidden_size is 10**15": hello({"identity": {**IDENTITY, "hidden_size": 10**15}}),
    "request_columns is 10**15": hello({"identity": {**IDENTITY, "request_columns": 10**15}}),
    "reply_columns is negative": hello({"identity": {**IDENTITY, "reply_columns": -1}}),
    "model is 60 KB": hello({"identity": {**IDENTITY, "model": "m" * 60_000}}),
    "model forges a log line": hello({"identity": {**IDENTITY, "model": "m\nWARNING forged\x1b[2J\ud800"}}),
    "dtype is no dtype": hello({"identity": {**IDENTITY, "dtype": "__class__"}}),
}  # fmt: skip


@pytest.mark.parametrize("what", FIRST_BYTES)
def test_instead_of_a_handshake(endpoint: Endpoint, server: Server, bystander: RetryingConnector, what: str) -> None:
    peer = Raw(endpoint)
    with suppress(ConnectionError):  # dropped before all of it was sent
        peer.say(FIRST_BYTES[what])
    answer = peer.rest()
    if FIRST_BYTES[what].startswith(wire.MAGIC) and answer:
        assert wire.unpack(answer[: wire.HEADER_SIZE]).kind is Kind.REFUSE
    assert reason(server)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + b"x" * 9000,
        b"TRACE / HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"PROPFIND / HTTP/1.1\r\n\r\n",
        b"VERSION-CONTROL / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda request_: request_.split()[0].decode(),
)
def test_an_http_client_gets_an_answer_it_can_read(
    endpoint: Endpoint, server: Server, bystander: RetryingConnector, request_: bytes
) -> None:
    peer = Raw(endpoint)
    began = time.monotonic()
    peer.say(request_)
    answer = ""
    while more := peer.socket.recv(1 << 16):  # to a proper end, not to a reset that may overtake the text
        answer += more.decode()
    assert time.monotonic() - began < 0.2  # without waiting for the rest of a header
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n")
    assert f"Content-Length: {len(text)}" in head
    assert "The OpenAI API is served by the attention role" in text
    assert reason(server) == "an HTTP client called the data port"


@pytest.mark.parametrize("size", [0, 4, 63, 64, 80])
def test_silence_in_the_handshake(endpoint: Endpoint, server: Server, bystander: RetryingConnector, size: int) -> None:
    peer = Raw(endpoint)
    peer.say(hello({"identity": IDENTITY})[:size])
    began = time.monotonic()
    assert peer.rest() == b""
    assert 0.2 < time.monotonic() - began < 2.5
    assert reason(server) == "it did not finish its handshake"


def test_a_handshake_byte_by_byte_takes_no_longer(
    endpoint: Endpoint, server: Server, bystander: RetryingConnector
) -> None:
    peer = Raw(endpoint)
    began = time.monotonic()
    with suppress(ConnectionError):
        for byte in hello({"identity": IDENTITY}):
            peer.say(bytes([byte]))
            time.sleep(0.02)
    assert peer.rest() == b""
    assert time.monotonic() - began < 2.5
    assert reason(server) == "it did not finish its handshake"


def call(peer: Raw, **changes: Any) -> bytes:
    """A right call of one row, with ``changes``; its payload is right for TCP unless it is changed."""
    shared = peer.socket.family.name == "AF_UNIX"
    right = Header(
        Kind.CALL, peer.session, 1, 1, 0, 0, DType.BFLOAT16, 1, HIDDEN, int(shared), 0 if shared else 2 * HIDDEN
    )
    return right._replace(**changes).pack() + b"\0" * (2 * HIDDEN)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": Kind.HELLO}, "HELLO where a call"),
        ({"kind": Kind.REPLY}, "REPLY where a call"),
        ({"session": 0}, "session 0, this connection is"),
        ({"session": 2**64 - 1}, "session 18446744073709551615"),
        ({"layer": LAYERS}, "layer 8 of 8"),
        ({"layer": 65535}, "layer 65535 of 8"),
        ({"dtype": DType.NONE}, "dtype NONE"),
        ({"dtype": DType.FLOAT16}, "dtype FLOAT16"),
        ({"width": 0}, "rows of 0"),
        ({"width": HIDDEN * 2}, "rows of 128"),
        ({"width": 2**32 - 1}, "rows of 4294967295"),
        ({"rows": 0}, "0 rows"),
        ({"rows": MAX_ROWS + 1}, "513 rows, between 1 and 512"),
        ({"rows": 2**32 - 1}, "4294967295 rows"),
        ({"flags": 2}, "flags 2"),
        ({"flags": 3}, "flags 3"),
        ({"payload": 4 << 30}, "a payload of 4294967296 bytes"),
        ({"payload": 2**64 - 1}, "a payload of 18446744073709551615"),
        ({"payload": 1}, "a payload of 1 bytes"),
    ],
    ids=str,
)
def test_a_call_with_a_wrong_field(
    endpoint: Endpoint, server: Server, bystander: RetryingConnector, changes: dict[str, Any], says: str
) -> None:
    peer = Raw(endpoint)
    peer.welcome()
    peer.say(call(peer, **changes))
    assert peer.rest() == b""
    assert says in reason(server)


def test_another_transport_than_was_agreed(endpoint: Endpoint, server: Server, bystander: RetryingConnector) -> None:
    peer = Raw(endpoint)
    peer.welcome()
    over_unix = endpoint.kind == "unix"
    peer.say(call(peer, flags=int(not over_unix), payload=2 * HIDDEN if over_unix else 0))
    assert peer.rest() == b""
    assert "flags" in reason(server)


def test_hello_twice(endpoint: Endpoint, server: Server, bystander: RetryingConnector) -> None:
    peer = Raw(endpoint)
    peer.welcome()
    peer.say(hello({"identity": IDENTITY}))
    assert peer.rest() == b""
    assert reason(server) == "HELLO where a call was expected"


def test_another_version_after_the_handshake(endpoint: Endpoint, server: Server, bystander: RetryingConnector) -> None:
    peer = Raw(endpoint)
    peer.welcome()
    frame = bytearray(call(peer))
    frame[4:6] = struct.pack("<H", 7)
    peer.say(sealed(frame))
    assert peer.rest() == b""
    assert "AFD protocol 7" in reason(server)


def test_a_call_before_ready(tcp: Endpoint, start: Start) -> None:
    server = start(tcp, loading=True)
    peer = Raw(tcp)
    peer.welcome()
    peer.say(call(peer))
    assert peer.rest() == b""
    assert reason(server) == "CALL before READY"
    server.finish_loading()
    assert_right(server.client())
