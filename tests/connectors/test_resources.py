"""What a server uses: no descriptors, processor time, threads or memory beyond what its work needs."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable

import torch
from lab import SOON, Server, assert_right, connector, random_rows
from raw import Raw

from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector

Start = Callable[..., Server]
Connect = Callable[..., RetryingConnector]


def test_no_descriptors_left(endpoint: Endpoint, start: Start) -> None:
    """Present peers are served, new ones wait, the log does not run over, and neither does the processor."""
    server = start(endpoint)
    client = server.client()
    assert_right(client)
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (server.fds(), limits[1]))
    crowd = [Raw(endpoint) for _ in range(5)]
    server.wait_for_line("cannot take another connection")
    used = processor_time(server)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert_right(client, rounds=1)
        time.sleep(0.05)
    assert processor_time(server) - used < 0.5
    assert len(server.lines("cannot take another connection")) == 1
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    for peer in crowd:
        peer.welcome()
        peer.close()
    assert_right(client)
    assert client.repeats == 0
    client.close()


def test_no_descriptor_left_for_shared_memory(unix: Endpoint, start: Start) -> None:
    """The log says so, and the peer, which did nothing wrong, is not refused: it comes again until there is one."""
    server = start(unix)
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    unused = [number for number in range(len(used) + 2) if number not in used]
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (unused[1], limits[1]))  # one is left, for the connection
    client = connector(unix)
    connecting = threading.Thread(target=client.connect)
    connecting.start()
    lines = server.wait_for_line("dropped: no file descriptor is left for its shared memory", 2)
    assert len(lines) == len(server.lines("dropped"))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    connecting.join(SOON)
    assert_right(client)
    client.close()


def processor_time(server: Server) -> float:
    with open(f"/proc/{server.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_an_idle_server_sleeps(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint, spin=50e-6)
    client = connect(endpoint, spin=50e-6)
    assert_right(client)
    peer = Raw(endpoint)
    peer.say(b"AFD1")
    used = processor_time(server)
    time.sleep(1.0)
    assert processor_time(server) - used <= 0.05
    peer.close()


def test_no_thread_is_started_for_calls(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    assert_right(client)

    def threads() -> tuple[int, int]:
        return tuple(len(list_threads(pid)) for pid in ("self", server.pid))  # type: ignore[return-value]

    before = threads()
    assert_right(client, rounds=6)
    assert threads() == before


def list_threads(pid: object) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def test_calls_allocate_nothing_that_stays(endpoint: Endpoint, start: Start, connect: Connect) -> None:
    server = start(endpoint)
    client = connect(endpoint)
    rows, out = random_rows(512), torch.empty(512, 64, dtype=torch.bfloat16)
    for layer in range(6):
        client.call(layer, rows, out)
    before = server.rss()
    for call in range(600):
        client.call(call % 6, rows, out)
    assert server.rss() - before < 2 << 20
