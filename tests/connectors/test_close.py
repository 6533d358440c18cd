"""close() from another thread ends whatever the connector is doing, and frees what it held."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeServer
from lab import WAITS, Server, ask, assert_right, connector, eventually, random_rows

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.errors import ConnectorError

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


def ends_with(client: RetryingConnector, action: Callable[[], object]) -> str:
    """What ``action``, which blocks in another thread, raises once ``client`` is closed."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), errors
    began = time.monotonic()
    client.close()
    thread.join(5)
    assert not thread.is_alive()
    assert time.monotonic() - began < 1
    (error,) = errors
    assert isinstance(error, ConnectorError)
    return str(error)


def test_during_a_call(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=60)
    assert "closed" in ends_with(client, lambda: ask(client, WAITS, random_rows(2)))
    server.let_go()
    assert_right(server.client())


def test_during_a_call_to_a_stopped_server(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=60)
    server.signal(signal.SIGSTOP)
    assert "closed" in ends_with(client, lambda: ask(client, 0, random_rows(2)))


def test_while_a_call_looks_for_a_server(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=60)
    server.kill()
    assert "closed" in ends_with(client, lambda: ask(client, 0, random_rows(2)))


def test_while_connecting(endpoint: Endpoint) -> None:
    client = connector(endpoint, connect_timeout=60)
    assert "closed" in ends_with(client, client.connect)


def test_in_the_handshake(tcp: Endpoint) -> None:
    with FakeServer(tcp, lambda peer: peer.wait_until_closed()):
        client = connector(tcp, connect_timeout=60)
        assert "closed" in ends_with(client, client.connect)


def test_while_the_server_is_loading(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint, loading=True)
    client = connect(endpoint, connect_timeout=60)
    assert "closed" in ends_with(client, client.wait_ready)


def test_a_call_after_it_fails_at_once(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint, call_timeout=60)
    client.close()
    client.close()
    for action in (lambda: ask(client, 0, random_rows(2)), client.connect, client.wait_ready):
        began = time.monotonic()
        with pytest.raises(ConnectorError, match="closed"):
            action()
        assert time.monotonic() - began < 0.5


def test_a_call_beside_a_stuck_one_fails_in_time(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint, call_timeout=0.5)

    def call() -> None:
        with pytest.raises(ConnectorError):
            ask(client, WAITS, random_rows(2))

    stuck = threading.Thread(target=call)
    stuck.start()
    assert eventually(lambda: client.calls == 1)
    began = time.monotonic()
    call()
    assert time.monotonic() - began < 1.5
    stuck.join()


def test_threads_that_call_at_once_do_not_mix(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    client = connect(endpoint)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(20):
                assert_right(client)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (client.calls, client.repeats) == (240, 0)


def test_nothing_is_left_in_this_process(endpoint: Endpoint, start: Start) -> None:
    gc.collect()  # what earlier tests left in cycles would go away in the middle of the count
    server = start(endpoint)

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:afd_patch")

    before = held()
    for _ in range(20):
        client = server.client()
        assert_right(client, rounds=1)
        client.close()
    assert held() == before
    server.kill()
    before = held()
    for _ in range(20):
        with pytest.raises(ConnectorError):
            connector(endpoint, connect_timeout=0.001).connect()
    assert held() == before
