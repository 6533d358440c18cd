"""The handshake: who does not belong together is told so on both sides, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from fakes import FakeServer
from lab import HIDDEN, MAX_ROWS, SOON, Server, assert_right, connector, identity
from raw import Raw, sealed

from afd_patch.connectors import wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import Kind
from afd_patch.errors import ConnectorError, HandshakeError
from afd_patch.identity import Identity

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]

#: A value that differs from the usual one, for every field in which both sides must agree.
OTHER: dict[str, Any] = {
    "vllm": "0.31.9", "model": "m1", "weights": "w1", "architecture": "OtherForCausalLM", "boundary": "moe",
    "gate": "attention", "dtype": "float16", "hidden_size": 128,
    "request_columns": 72, "reply_columns": 128, "layers": 9, "compiled": True,
}  # fmt: skip


def test_no_field_is_forgotten() -> None:
    assert {field.name for field in fields(Identity)} == OTHER.keys() | {"max_rows"}


@pytest.mark.parametrize("field", OTHER)
def test_a_difference_is_refused_on_both_sides_with_both_values(tcp: Endpoint, start: Start, field: str) -> None:
    server = start(tcp)
    here, there = getattr(identity(), field), OTHER[field]
    with pytest.raises(HandshakeError) as refusal:
        connector(tcp, who=identity(**{field: there})).connect()
    sentence = f"{field}: {here!r} here, {there!r} there"
    assert sentence in str(refusal.value)
    assert str(tcp) in str(refusal.value)
    (line,) = server.wait_for_line("dropped")
    assert sentence in line
    assert_right(server.client())


@pytest.mark.parametrize("field", OTHER)
def test_the_attention_role_compares_too(tcp: Endpoint, field: str) -> None:
    """A server that welcomes anybody is refused by the client."""
    with (
        FakeServer(tcp, lambda peer: peer.welcome(identity(**{field: OTHER[field]}))),
        pytest.raises(HandshakeError, match=f"{field}: "),
    ):
        connector(tcp).connect()


def test_all_differences_are_named(tcp: Endpoint, start: Start) -> None:
    start(tcp)
    with pytest.raises(HandshakeError, match=r"model: .*; weights: .*; layers: "):
        connector(tcp, who=identity(model="x", weights="y", layers=4)).connect()


def test_one_rank_and_several_behind_a_compiled_sum() -> None:
    parts = identity(compiled=True, reply_columns=2 * HIDDEN)
    sentence = parts.mismatch(replace(parts, reply_columns=HIDDEN)) or ""
    assert sentence.endswith("both need one tensor-parallel rank, or both several")
    for other in (replace(parts, reply_columns=HIDDEN, layers=4), replace(parts, compiled=False, reply_columns=HIDDEN)):
        assert "rank" not in (parts.mismatch(other) or "")


def test_more_rows_than_the_server_takes_are_refused(endpoint: Endpoint, start: Start) -> None:
    start(endpoint)
    with pytest.raises(HandshakeError, match=rf"up to 513 rows .* takes {MAX_ROWS}; start it with .* 513"):
        connector(endpoint, who=identity(max_rows=MAX_ROWS + 1)).connect()


def test_fewer_rows_are_welcome(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    assert_right(connect(endpoint, who=identity(max_rows=11)))


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
@pytest.mark.parametrize("value", ["missing", None, [], 1.5])
def test_a_field_that_is_missing_or_of_another_type_is_refused(
    tcp: Endpoint, start: Start, field: str, value: object
) -> None:
    server = start(tcp)
    content = identity().to_json()
    if value == "missing":
        del content[field]
    else:
        content[field] = value
    peer = Raw(tcp)
    peer.say(wire.text_frame(Kind.HELLO, {"identity": content}))
    header, body = peer.frame()
    assert header.kind is Kind.REFUSE
    assert repr(field) in wire.parse_text(header, body)["reason"]
    assert peer.rest() == b""
    assert_right(server.client(), rounds=1)


def test_a_refusal_does_not_wait_for_the_timeout(endpoint: Endpoint, start: Start) -> None:
    start(endpoint)
    began = time.monotonic()
    with pytest.raises(HandshakeError):
        connector(endpoint, who=identity(model="other"), connect_timeout=60).connect()
    assert time.monotonic() - began < 2


def test_another_protocol_version_is_refused_at_once_on_both_sides(tcp: Endpoint, start: Start) -> None:
    server = start(tcp)
    newer = bytearray(wire.text_frame(Kind.HELLO, {"identity": identity().to_json()}))
    newer[4] += 1
    peer = Raw(tcp)
    peer.say(sealed(newer))
    header, body = peer.frame()
    assert header.kind is Kind.REFUSE
    assert "AFD protocol 3 from the peer, 2 here" in wire.parse_text(header, body)["reason"]
    (line,) = server.wait_for_line("dropped")
    assert "AFD protocol 3 from the peer, 2 here" in line
    server.kill()

    refuse = bytearray(wire.text_frame(Kind.REFUSE, {"reason": "?"}))
    refuse[4] += 1
    with (
        FakeServer(tcp, lambda peer: peer.say(sealed(refuse))),
        pytest.raises(HandshakeError, match="AFD protocol 3 from"),
    ):
        connector(tcp, connect_timeout=60).connect()


def test_no_server_ends_with_the_connect_timeout(endpoint: Endpoint) -> None:
    client = connector(endpoint, connect_timeout=0.5)
    began = time.monotonic()
    with pytest.raises(ConnectorError, match=r"no FFN server answered at .* within 0.5 s") as error:
        client.connect()
    assert str(endpoint) in str(error.value)
    assert "AFD_CONNECT_TIMEOUT" in str(error.value)
    assert time.monotonic() - began < 1.5


def test_a_server_that_says_nothing_ends_with_the_connect_timeout(tcp: Endpoint) -> None:
    with FakeServer(tcp, lambda peer: peer.wait_until_closed()):
        began = time.monotonic()
        with pytest.raises(ConnectorError, match=r"within 0\.5 s") as error:
            connector(tcp, connect_timeout=0.5).connect()
        assert str(tcp) in str(error.value)
        assert time.monotonic() - began < 1.5


def test_something_that_is_no_ffn_server(tcp: Endpoint) -> None:
    with (
        FakeServer(tcp, lambda peer: peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64)),
        pytest.raises(ConnectorError, match="not an AFD frame: it starts with b'HTTP'"),
    ):
        connector(tcp, connect_timeout=0.5).connect()


def test_a_server_that_appears_later_is_found(endpoint: Endpoint, start: Start) -> None:
    client = connector(endpoint)
    found = threading.Thread(target=client.connect)
    found.start()
    start(endpoint)  # forks beside a thread that only waits
    found.join(SOON)
    assert not found.is_alive()
    assert_right(client)
    client.close()


def test_handshake_while_loading_then_ready(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, loading=True)
    client = connect(endpoint)
    with pytest.raises(HandshakeError):
        connector(endpoint, who=identity(model="other")).connect()
    waiting = threading.Thread(target=client.wait_ready)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    server.finish_loading()
    waiting.join(SOON)
    assert not waiting.is_alive()
    assert_right(client)


def test_a_call_waits_for_a_server_that_is_loading(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, loading=True)
    client = connect(endpoint)
    timer = threading.Timer(0.2, server.finish_loading)
    timer.start()
    assert_right(client)
    assert client.repeats == 0


def test_a_ready_that_never_comes_ends_with_the_connect_timeout(
    endpoint: Endpoint, start: Start, connect: Connect
) -> None:
    start(endpoint, loading=True)
    client = connect(endpoint, connect_timeout=0.5)
    began = time.monotonic()
    with pytest.raises(ConnectorError, match=r"not ready within 0.5 s .*still loading") as error:
        client.wait_ready()
    assert str(endpoint) in str(error.value)
    assert time.monotonic() - began < 1.5


def test_a_server_that_dies_while_loading_is_found_again(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, loading=True)
    client = connect(endpoint)
    server.kill()
    start(endpoint)
    client.wait_ready()
    assert_right(client)
