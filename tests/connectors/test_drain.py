"""SIGTERM: calls in work are completed, then the server ends and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lab import (
    HIDDEN,
    SOON,
    WAITS,
    Forked,
    Server,
    ask,
    assert_right,
    connector,
    identity,
    random_rows,
    reference,
)
from raw import Raw, framed

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.errors import ConnectorError
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.server import FFNServer

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


def test_an_idle_server_ends(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, drain_idle=0.5)
    assert_right(connect(endpoint))
    server.signal(signal.SIGTERM)
    assert server.wait(3) == 0
    assert server.lines("served 3 calls")
    if endpoint.kind == "unix":
        assert not os.path.lexists(endpoint.path)


@pytest.mark.parametrize("peers", ["none", "one that has left", "one that has not called", "one that is in no request"])
def test_a_server_that_nobody_is_about_to_call_ends_at_once(
    endpoint: Endpoint, start: Start, connect: Connect, peers: str
) -> None:
    server = start(endpoint, drain_idle=1.5 if peers == "one that is in no request" else SOON)
    if peers != "none":
        client = connect(endpoint)
    if peers == "one that has left":
        assert_right(client)
        client.close()
    if peers == "one that is in no request":
        assert_right(client)
        time.sleep(1.6)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait(3) == 0
    assert time.monotonic() - began < 1


def test_a_call_in_work_is_completed(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, drain_idle=0.5)
    client = connect(endpoint)
    results: list[torch.Tensor] = []
    call = threading.Thread(target=lambda: results.append(ask(client, WAITS, random_rows(4))))
    call.start()
    server.entered()
    server.signal(signal.SIGTERM)
    server.let_go()
    call.join(SOON)
    assert torch.equal(results[0], reference(WAITS, random_rows(4)))
    assert client.repeats == 0
    assert server.wait(3) == 0


def test_a_call_that_waits_behind_one_whose_peer_has_gone_is_completed(
    endpoint: Endpoint, start: Start, connect: Connect, folder: Path
) -> None:
    server = start(endpoint, drain_idle=0.1)
    client = connect(endpoint)

    def long_call() -> None:
        other = connector(endpoint)
        other.connect()
        ask(other, WAITS, random_rows(4))

    process = Forked(long_call, folder / "attention.log")
    server.entered()
    results: list[torch.Tensor] = []
    call = threading.Thread(target=lambda: results.append(ask(client, 0, random_rows(4))))
    call.start()
    time.sleep(0.3)
    process.kill()
    server.signal(signal.SIGTERM)
    server.let_go()
    call.join(SOON)
    assert torch.equal(results[0], reference(0, random_rows(4)))
    assert client.repeats == 0
    assert server.wait(3) == 0


def test_a_call_that_has_begun_to_arrive_is_completed(tcp: Endpoint, start: Start) -> None:
    server = start(tcp, drain_idle=0.2)
    peer = Raw(tcp)
    peer.welcome()
    payload = random_rows(4).view(torch.uint8).numpy().tobytes()
    frame = framed(Header(Kind.CALL, peer.session, dtype=DType.BFLOAT16, rows=4, width=HIDDEN), payload)
    peer.say(frame[:-1])
    assert_right(server.client())  # so the server has seen what came before
    server.signal(signal.SIGTERM)
    time.sleep(0.8)  # longer than an idle server stays
    peer.say(payload[-1:])
    assert peer.frame()[0].kind is Kind.REPLY
    assert server.wait(3) == 0


def test_a_forward_in_work_goes_on_layer_by_layer(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, drain_idle=0.5)
    client = connect(endpoint)
    assert_right(client)
    server.signal(signal.SIGTERM)
    for _ in range(10):
        time.sleep(0.05)  # attention computes
        assert_right(client, rounds=1)
    assert client.repeats == 0
    assert server.wait(3) == 0


def test_a_forward_whose_attention_takes_long_is_completed(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    ask(client, 0, random_rows(4))
    server.signal(signal.SIGTERM)
    for layer in (1, 2):
        time.sleep(1.0)  # attention computes
        assert torch.equal(ask(client, layer, random_rows(4)), reference(layer, random_rows(4)))
    assert client.repeats == 0
    client.close()
    assert server.wait(3) == 0


def test_a_peer_that_never_stops_ends_with_the_drain_timeout(
    endpoint: Endpoint, start: Start, connect: Connect
) -> None:
    server = start(endpoint, drain=0.7)
    client = connect(endpoint, call_timeout=0.5)
    server.signal(signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(ConnectorError):  # when the server has gone
        assert_right(client, rounds=10**6)
    assert server.wait(3) == 0
    assert time.monotonic() - began < 3


def test_a_draining_server_takes_nobody_new(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    stop = threading.Event()

    def keep_calling() -> None:  # an idle server would end
        while not stop.is_set():
            assert_right(client, rounds=1)

    calls = threading.Thread(target=keep_calling)
    calls.start()
    server.signal(signal.SIGTERM)
    with pytest.raises(ConnectorError):
        connector(endpoint, connect_timeout=0.3).connect()
    stop.set()
    calls.join(SOON)
    assert client.repeats == 0
    assert client.calls > 0


def test_signals_again_and_after_the_end_do_no_harm(unix: Endpoint) -> None:
    server = FFNServer(Listener(unix), identity())
    for _ in range(100_000):  # more than the pipe that wakes the loop takes
        server.drain(0.0)
    server.serve(reference)
    server.close()
    server.close()
    server.drain(1.0)
    server.stop_loop()


def test_a_loop_that_is_stopped_before_it_starts_ends(unix: Endpoint) -> None:
    """Loading may fail before the thread that shakes hands has begun."""
    server = FFNServer(Listener(unix), identity())
    server.stop_loop()
    thread = threading.Thread(target=server.shake_hands, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    server.close()
