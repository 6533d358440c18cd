"""What the log says: one line per event, none per layer, no stack trace for what somebody else did."""

from __future__ import annotations

import logging
from collections.abc import Callable

import lab
import pytest
import torch
from fakes import FakePeer, FakeServer
from lab import FAILS, SOON, Server, ask, assert_right, connector, eventually, random_rows
from raw import Raw

from afd_patch.connectors import retry
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.log_limit import LogLimit
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import Header, Kind
from afd_patch.errors import ConnectorError, RemoteFFNError
from afd_patch.ffn import server as ffn_server
from afd_patch.ffn.peer import Peer

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


@pytest.fixture(autouse=True)
def afd_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    # vLLM's logging, if it is configured in this process, does not hand lines on to the root.
    logger = logging.getLogger("vllm.afd_patch")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    return caplog


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    # A line that reaches the handler twice, by its logger and by the root, is one.
    return [record.getMessage() for record in {id(record): record for record in caplog.records}.values()]


def test_a_lost_server_is_one_line(
    endpoint: Endpoint, start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(endpoint)
    client = connect(endpoint, call_timeout=1.0)
    server.kill()
    with pytest.raises(ConnectorError):
        ask(client, 3, random_rows(2))
    lines = messages(caplog)
    assert 1 <= len(lines) <= 2, lines  # that it was lost, and that it cannot be reached
    assert all(str(endpoint) in line and "layer 3" in line and "repeating the call" in line for line in lines)
    assert not any(record.exc_info for record in caplog.records)


def test_a_server_that_drops_every_call_is_one_line(tcp: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    def script(peer: FakePeer) -> None:
        peer.welcome()
        peer.read_call()

    with FakeServer(tcp, script) as server:
        client = connector(tcp, call_timeout=0.7)
        client.connect()
        for layer in range(3):  # as a forward goes on with the next layer, or the next request
            with pytest.raises(ConnectorError):
                ask(client, layer, random_rows(2))
        assert server.accepted > 9
        client.close()
    lines = [line for line in messages(caplog) if "closed by the peer" in line]
    assert len(lines) == 1, lines


def test_waiting_for_a_server_is_one_line(tcp: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConnectorError):
        connector(tcp, connect_timeout=0.5).connect()
    (line,) = messages(caplog)
    assert "waiting for an FFN server at" in line
    assert str(tcp) in line


def test_a_server_that_does_not_stay_while_loading_is_one_line(tcp: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with FakeServer(tcp, lambda peer: peer.welcome(ready=False)) as server:
        client = connector(tcp, connect_timeout=0.7)
        client.connect()
        with pytest.raises(ConnectorError, match="not ready"):
            client.wait_ready()
        assert server.accepted > 3
        client.close()
    assert len(messages(caplog)) == 1, messages(caplog)


def test_good_peers_come_and_go_with_one_line(endpoint: Endpoint, start: Start) -> None:
    server = start(endpoint)
    for _ in range(3):
        client = server.client()
        assert_right(client)
        client.close()
    assert eventually(lambda: len(server.lines("left after")) == 3)
    assert [line.partition("left ")[2] for line in server.log()] == ["after 3 calls"] * 3
    assert all(line.startswith("INFO AFD ffn: peer ") for line in server.log())


@pytest.mark.parametrize("loading", [True, False])
def test_a_peer_that_only_looked_is_no_line(endpoint: Endpoint, start: Start, loading: bool) -> None:
    """As the front end of the attention role does, before anything is loaded."""
    quiet = start(endpoint, loading=loading)
    quiet.client().close()
    if loading:
        quiet.finish_loading()
    client = quiet.client()
    assert_right(client, rounds=1)
    client.close()
    assert eventually(lambda: quiet.lines("left after 1 calls"))  # the other was gone by then
    assert len(quiet.log()) == 1
    quiet.kill()
    talkative = start(endpoint, loading=loading, level=logging.DEBUG)
    talkative.client().close()
    (line,) = talkative.wait_for_line("left after")
    assert line == "DEBUG AFD ffn: peer 1 left after 0 calls"


def test_a_peer_that_goes_in_the_middle_of_something_is_a_line(tcp: Endpoint, start: Start) -> None:
    server = start(tcp)
    for number, begun in enumerate([b"A", Header(Kind.CALL).pack()[:63]]):
        peer = Raw(tcp)
        peer.welcome()
        peer.say(begun)
        peer.close()
        server.wait_for_line("dropped: connection lost (closed by the peer)", number + 1)
    Raw(tcp).close()  # before its handshake
    server.wait_for_line("dropped: connection lost (closed by the peer)", 3)
    assert not server.lines("left after")


def test_a_failing_layer_says_where_it_failed(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    """That is the server's own fault, so its log has the stack trace that the answer has not."""
    server = start(endpoint)
    with pytest.raises(ConnectorError) as error:
        ask(connect(endpoint), 6, random_rows(2))
    assert "Traceback" not in str(error.value)
    assert len(server.lines("Traceback")) == 1


def test_a_defect_of_the_server_costs_one_connection(
    tcp: Endpoint, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with one peer, the loop goes on for the others; here something unforeseen does."""
    accept = Peer.accept

    def accept_all_but_one(self: Peer, identity: object, area: object) -> None:
        if self.session == 2:
            raise ZeroDivisionError("unforeseen")
        accept(self, identity, area)  # type: ignore[arg-type]

    monkeypatch.setattr(Peer, "accept", accept_all_but_one)
    server = start(tcp)
    client = connect(tcp)
    assert_right(client)
    unlucky = Raw(tcp)
    unlucky.hello()
    assert unlucky.rest() == b""
    assert_right(client)
    assert client.repeats == 0
    assert server.lines("ZeroDivisionError, a defect of the server")
    server.log_file.write_text("")  # it was meant to be there


def test_a_peer_that_is_dropped_has_its_own_address(endpoint: Endpoint, start: Start) -> None:
    server = start(endpoint)
    peer = Raw(endpoint)
    address = peer.socket.getsockname()
    peer.say(b"nonsense")
    (line,) = server.wait_for_line("dropped")
    name = "peer 1" if endpoint.kind == "unix" else f"peer 1 from {address[0]}:{address[1]}"
    assert line == f"INFO AFD ffn: {name} at {endpoint} dropped: not an AFD frame: it starts with b'nons'"


def test_many_who_are_dropped_for_one_reason_are_summed_up(
    endpoint: Endpoint, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffn_server, "_LOG_SECONDS", 1.0)
    server = start(endpoint)
    for _ in range(100):
        Raw(endpoint).close()
    (line,) = server.wait_for_line("more within")
    assert (
        line == f"INFO AFD ffn: {endpoint}: 90 more within 1 s, the last: dropped: connection lost (closed by the peer)"
    )
    assert len(server.lines("dropped: connection lost (closed by the peer)")) == 11
    Raw(endpoint).say(b"nonsense")  # another reason, and then the same one after its time
    server.wait_for_line("not an AFD frame")
    Raw(endpoint).close()
    server.wait_for_line("dropped: connection lost (closed by the peer)", 12)


def test_a_call_that_the_ffn_refuses_is_one_line_without_a_stack_trace(
    endpoint: Endpoint, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layer: int, rows: torch.Tensor) -> torch.Tensor:
        raise ConnectorError(f"the routing names experts from 0 to {4096 + layer}, and there are 8")

    monkeypatch.setattr(lab, "reference", refuse)
    monkeypatch.setattr(ffn_server, "_LOG_SECONDS", 1.0)
    server = start(endpoint)
    client = connect(endpoint)
    for layer in range(5):
        with pytest.raises(RemoteFFNError, match=f"from 0 to {4096 + layer}, and there are 8"):
            ask(client, layer, random_rows(2))
    (line,) = server.lines("from 0 to 4096")
    assert line.startswith("WARNING AFD ffn: layer 0 failed on 2 rows of peer 1")
    server.wait_for_line(
        "4 more within 1 s, the last: failed: ConnectorError('the routing names experts from 0 to 4100"
    )
    assert len(server.lines("the routing names")) == 2
    assert not server.lines("Traceback")


def test_a_stack_trace_is_not_repeated(
    endpoint: Endpoint, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffn_server, "_LOG_SECONDS", 1.0)
    server = start(endpoint)
    client = connect(endpoint)
    for count in range(1, 6):
        with pytest.raises(RemoteFFNError):
            ask(client, FAILS, random_rows(count))
    server.wait_for_line("4 more within 1 s, the last: failed: RuntimeError('no such expert')")
    assert len(server.lines("Traceback")) == len(server.lines(f"layer {FAILS} failed on")) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a ``LogLimit`` goes by."""
    now = [100.0]
    monkeypatch.setattr("afd_patch.connectors.log_limit.time.monotonic", lambda: now[0])
    return now


def test_the_limit(clock: list[float]) -> None:
    limit = LogLimit(5.0)
    assert limit.due("layer 1 lost")
    assert not limit.due("layer 22 lost")  # numbers make no other cause
    assert limit.due("something else")
    clock[0] += 5.0
    assert limit.due("layer 1 lost")
    assert retry.PROGRESS == 5.0 < SOON


def test_the_limit_counts_what_it_holds_back(clock: list[float]) -> None:
    limit = LogLimit(5.0)
    assert [limit.due(f"layer {layer} lost", lines=2) for layer in range(5)] == [True, True, False, False, False]
    assert limit.due("something else")
    assert limit.omitted() == []
    clock[0] += 5.0
    assert limit.due("layer 7 lost", lines=2)  # the next window, and nobody has asked for the number of the last one
    assert limit.omitted() == [(3, "layer 4 lost")]
    clock[0] += 5.0
    assert limit.omitted() == []


def test_ever_new_causes_fill_neither_memory_nor_log(clock: list[float]) -> None:
    limit = LogLimit(5.0)
    causes = ["x" * 10 + chr(97 + number % 26) * (number // 26) for number in range(1000)]
    for _ in range(2):
        assert 32 < sum([limit.due(cause) for cause in causes]) <= 65
        assert len(limit._windows) <= 65
        clock[0] += 5.0
    assert sum(count for count, _ in limit.omitted()) > 900
    assert not limit._windows
