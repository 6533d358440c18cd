"""Several attention processes at one server: own row counts, own pace, own buffers."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lab import (
    HIDDEN,
    MAX_ROWS,
    SOON,
    WAITS,
    Forked,
        Server,
    ask,
    assert_right,
    connector,
    eventually,
    random_rows,
    reference,
)  # fmt: skip
from raw import Raw, framed

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import DType, Header, Kind

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


def test_processes_with_their_own_row_counts(endpoint: Endpoint, start: Start, folder: Path) -> None:
    server = start(endpoint)

    def attention(seed: int) -> None:
        dice = random.Random(seed)
        client = connector(endpoint)
        client.connect()
        for call in range(150):
            layer, rows = dice.randrange(6), random_rows(dice.randint(1, 40), seed=seed * 1000 + call)
            assert torch.equal(ask(client, layer, rows), reference(layer, rows)), (seed, call)
        assert client.repeats == 0
        client.close()

    processes = [Forked(lambda seed=seed: attention(seed), folder / f"attention-{seed}.log") for seed in range(4)]  # type: ignore[misc]
    for process in processes:
        assert process.wait(60) == 0, process.log()
    assert len(server.wait_for_line("left after", 4)) == 4  # each of them once, when it went


def test_interleaved_calls_of_different_layers(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    start(endpoint)
    clients = [connect(endpoint) for _ in range(3)]
    for call in range(60):
        client, layer = clients[call % 3], call % 5
        rows = random_rows(1 + call % 17, seed=call)
        assert torch.equal(ask(client, layer, rows), reference(layer, rows))


def begin_call(peer: Raw, rows: int = 4) -> bytes:
    """The complete frame of a call of layer 0 by ``peer``, with its rows."""
    payload = random_rows(rows).view(torch.uint8).numpy().tobytes()
    return framed(Header(Kind.CALL, peer.session, call=1, dtype=DType.BFLOAT16, rows=rows, width=HIDDEN), payload)


@pytest.mark.parametrize("stops_after", [1, 63, 64, 65, 200])
def test_a_peer_that_stops_mid_frame_holds_up_nobody(
    tcp: Endpoint, start: Start, connect: Connect, stops_after: int
) -> None:
    server = start(tcp, frame_timeout=0.6)
    client = connect(tcp)
    stalled = Raw(tcp)
    stalled.welcome()
    stalled.say(begin_call(stalled)[:stops_after])
    end = time.monotonic() + 2.5
    while time.monotonic() < end and not server.lines("dropped"):
        began = time.monotonic()
        assert_right(client, rounds=1)  # goes on also while nothing but calls wakes the loop
        assert time.monotonic() - began < 0.5
    (line,) = server.lines("dropped")
    assert "stopped in the middle of a frame" in line
    assert stalled.rest() == b""
    assert client.repeats == 0


def test_a_peer_that_sends_byte_by_byte_is_served(tcp: Endpoint, start: Start) -> None:
    start(tcp)
    peer = Raw(tcp)
    peer.welcome()
    for byte in begin_call(peer, rows=2):
        peer.say(bytes([byte]))
    header, payload = peer.frame()
    assert (header.kind, header.call) == (Kind.REPLY, 1)
    assert payload == reference(0, random_rows(2)).view(torch.uint8).numpy().tobytes()


def test_a_long_computation_delays_others_by_no_more_than_itself(
    endpoint: Endpoint, start: Start, connect: Connect, folder: Path
) -> None:
    server = start(endpoint)
    client = connect(endpoint)

    def slow() -> None:
        own = connector(endpoint)
        own.connect()
        assert torch.equal(ask(own, WAITS, random_rows(3)), reference(WAITS, random_rows(3)))

    process = Forked(slow, folder / "slow.log")
    server.entered()
    server.let_go()
    assert_right(client)
    assert process.wait() == 0, process.log()


def test_a_peer_that_never_reads_its_replies_is_dropped(tcp: Endpoint, start: Start, connect: Connect) -> None:
    server = start(tcp, frame_timeout=0.5)
    client = connect(tcp)
    deaf = Raw(tcp)
    deaf.welcome()
    frame = begin_call(deaf, rows=MAX_ROWS)
    deaf.socket.settimeout(0.05)
    try:
        for _ in range(4000):
            deaf.say(frame)
    except (TimeoutError, ConnectionError):
        pass
    assert_right(client)
    (line,) = server.wait_for_line("dropped")
    assert "did not take its reply" in line
    assert_right(client)
    assert client.repeats == 0


def test_a_reply_that_waits_is_not_overwritten(tcp: Endpoint, start: Start, connect: Connect) -> None:
    """What waits for a slow reader stays as it was computed, whatever is computed for others meanwhile."""
    start(tcp)
    client = connect(tcp)
    slow = Raw(tcp)
    slow.welcome()
    calls = 1500
    slow.socket.settimeout(0.05)
    frame = begin_call(slow, rows=MAX_ROWS)
    pending = frame * calls
    while pending:
        try:
            count = slow.socket.send(pending)
        except TimeoutError:
            break  # the server has stopped reading: its replies wait
        pending = pending[count:]
    assert pending
    slow.socket.settimeout(SOON)
    assert torch.equal(ask(client, 1, others := random_rows(MAX_ROWS, seed=5)), reference(1, others))
    expected = reference(0, random_rows(MAX_ROWS)).view(torch.uint8).numpy().tobytes()
    for _ in range(calls - -(-len(pending) // len(frame))):
        assert slow.frame()[1] == expected


@pytest.mark.parametrize("when", ["idle", "in a call", "in the middle of a frame"])
def test_a_killed_attention_process_leaves_nothing(
    endpoint: Endpoint, start: Start, connect: Connect, folder: Path, when: str
) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    assert_right(client)
    fds, areas = server.fds(), server.shared_areas()
    ready, tell = os.pipe()

    def attention() -> None:
        if when == "in the middle of a frame":
            peer = Raw(endpoint)
            peer.welcome()
            peer.say(begin_call(peer)[: 70 if endpoint.kind == "tcp" else 50])
        own = connector(endpoint)
        own.connect()
        assert_right(own)
        os.write(tell, b"x")
        ask(own, WAITS if when == "in a call" else 0, random_rows(2))
        time.sleep(60)

    process = Forked(attention, folder / "attention.log")
    os.read(ready, 1)
    if when == "in a call":
        server.entered()
    process.kill()
    os.close(ready)
    os.close(tell)
    if when == "in a call":
        server.let_go()
    assert_right(client)
    assert eventually(lambda: server.fds() == fds), (server.fds(), fds)
    assert server.shared_areas() == areas
    assert client.repeats == 0
