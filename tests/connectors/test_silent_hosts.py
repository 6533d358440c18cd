"""A host that answers nothing any more, at any point of a conversation: nobody waits for it longer than is said."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fakes import FakePeer, FakeServer
from lab import Server, ask, assert_right, connector, free_endpoint, random_rows

from afd_patch.connectors import stream
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import Header, Kind
from afd_patch.errors import ConnectorError

Start = Callable[..., Server]


@contextmanager
def a_full_queue(endpoint: Endpoint) -> Iterator[None]:
    """A listener that accepts nobody, and whose queue is full: the kernel does not answer whoever asks."""
    with ExitStack() as stack:
        stack.enter_context(socket.create_server(endpoint.address, backlog=0))
        while True:
            sock = stack.enter_context(socket.socket())
            sock.settimeout(0.3)
            try:
                sock.connect(endpoint.address)
            except TimeoutError:
                break
        yield


def test_half_a_ready_is_not_waited_for_longer_than_a_call(tcp: Endpoint) -> None:
    def half(peer: FakePeer) -> None:
        peer.welcome(ready=False)
        peer.say(Header(Kind.READY, peer.session).pack()[:30])
        peer.wait_until_closed()

    with FakeServer(tcp, half):
        began = time.monotonic()
        with pytest.raises(ConnectorError, match=r"within 0\.5 s"):
            ask(connector(tcp, call_timeout=0.5), 1, random_rows(3))
        assert time.monotonic() - began < 2


def test_one_of_two_that_loads_for_ever_at_the_start(tcp: Endpoint, folder: Path, start: Start) -> None:
    other = free_endpoint("tcp", folder)
    start(tcp, loading=True)
    start(other)
    client = connector(tcp, other, connect_timeout=1.0)
    client.connect()
    client.wait_ready()
    assert_right(client)
    client.close()


def test_connecting_is_tried_again_and_logged(
    tcp: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel alone would ask again after a second, then after two, four, eight."""
    monkeypatch.setattr(stream, "_ATTEMPT", 0.1)
    caplog.set_level(logging.INFO, "vllm.afd_patch")
    with a_full_queue(tcp), pytest.raises(ConnectorError, match=r"within 0\.5 s \(timed out\)"):
        connector(tcp, connect_timeout=0.5).connect()
    assert f"waiting for an FFN server at {tcp} (timed out)" in caplog.text


def test_a_host_that_is_gone_is_noticed() -> None:
    """By the kernel of either side, also between calls: here its settings, for nobody can pull a plug in a test."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        for sock in (client, listener.accept()[0]):
            with sock:
                stream.set_options(sock)
                idle, interval, probes = (
                    sock.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert idle + interval * probes <= 10
