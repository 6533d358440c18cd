"""A server that dies, stops or comes back: the call is repeated and right, or fails within its time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from lab import FAILS, SOON, WAITS, Server, ask, assert_right, free_endpoint, identity, random_rows, reference

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.errors import ConnectorError, HandshakeError, RemoteFFNError

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]
ROWS = random_rows(5)


class Call(threading.Thread):
    """A call of ``layer`` in another thread."""

    def __init__(self, client: RetryingConnector, layer: int) -> None:
        super().__init__(daemon=True)
        self._client, self._layer = client, layer
        self._future: Future[torch.Tensor] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._future.set_result(ask(self._client, self._layer, ROWS))
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> torch.Tensor:
        return self._future.result(SOON)


def test_killed_during_a_call_and_restarted(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    call = Call(client, WAITS)
    server.entered()
    server.kill()
    again = start(endpoint)
    again.let_go()
    assert torch.equal(call.result(), reference(WAITS, ROWS))
    assert client.repeats == 1
    assert_right(client)


def test_killed_between_calls_and_restarted(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    for _ in range(5):
        assert_right(client)
        server.kill()
        server = start(endpoint)
    assert_right(client)


def test_killed_and_restarted_while_it_loads_again(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    server.kill()
    again = start(endpoint, loading=True)
    call = Call(client, 2)
    threading.Timer(0.2, again.finish_loading).start()
    assert torch.equal(call.result(), reference(2, ROWS))


@pytest.mark.parametrize("during", [True, False], ids=["during a call", "between calls"])
def test_not_restarted(endpoint: Endpoint, start: Start, connect: Connect, during: bool) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=0.8)
    began = time.monotonic()
    if during:
        call = Call(client, WAITS)
        server.entered()
        server.kill()
    else:
        server.kill()
        call = Call(client, WAITS)
    with pytest.raises(ConnectorError, match=rf"layer {WAITS}: no FFN server at .* answered within 0.8 s") as error:
        call.result()
    assert str(endpoint) in str(error.value)
    assert "AFD_CALL_TIMEOUT" in str(error.value)
    assert time.monotonic() - began < 1.8
    start(endpoint)
    assert_right(client)  # an error is no end either


def test_stopped_and_continued_within_the_limit(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    server.signal(signal.SIGSTOP)
    call = Call(client, 3)
    call.join(0.3)
    assert call.is_alive()
    server.signal(signal.SIGCONT)
    assert torch.equal(call.result(), reference(3, ROWS))
    assert client.repeats == 0


def test_stopped_for_ever(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=0.6)
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ConnectorError, match=r"layer 3: .*within 0.6 s") as error:
        ask(client, 3, ROWS)
    assert str(endpoint) in str(error.value)
    assert time.monotonic() - began < 1.6
    server.signal(signal.SIGCONT)
    assert_right(client)  # and the late reply of before is not taken for one of these


def test_restarted_with_another_model(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=60)
    server.kill()
    start(endpoint, identity(model="another"))
    with pytest.raises(HandshakeError, match="model: 'another' here, 'm0' there"):
        ask(client, 0, ROWS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_second_server_takes_over(
    folder: Path, endpoint: Endpoint, start: Start, connect: Connect, number: signal.Signals
) -> None:
    spare = free_endpoint(endpoint.kind, folder, "spare")
    first, second = start(endpoint), start(spare)
    client = connect(endpoint, spare, call_timeout=1.6)
    call = Call(client, WAITS)
    first.entered()
    first.signal(number)
    second.let_go()
    assert torch.equal(call.result(), reference(WAITS, ROWS))
    assert client.repeats == 1
    assert_right(client)
    assert client.repeats == 1  # it stays there


def test_the_second_server_is_found_at_the_start(folder: Path, endpoint: Endpoint, start: Start) -> None:
    spare = free_endpoint(endpoint.kind, folder, "spare")
    server = start(spare)
    client = RetryingConnector([endpoint, spare], server.identity, connect_timeout=SOON, call_timeout=SOON)
    client.connect()
    assert_right(client)
    client.close()


def test_both_servers_die_and_the_first_returns(
    folder: Path, endpoint: Endpoint, start: Start, connect: Connect
) -> None:
    spare = free_endpoint(endpoint.kind, folder, "spare")
    first, second = start(endpoint), start(spare)
    client = connect(endpoint, spare)
    assert_right(client)
    first.kill()
    assert_right(client)
    second.kill()
    start(endpoint)
    assert_right(client)


def test_an_error_of_the_ffn_is_not_repeated(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    with pytest.raises(RemoteFFNError, match=f"layer {FAILS}: RuntimeError: no such expert") as error:
        ask(client, FAILS, ROWS)
    assert str(endpoint) in str(error.value)
    assert client.repeats == 0
    assert len(server.lines(f"layer {FAILS} failed on 5 rows")) == 1
    assert_right(client)
