"""Shared memory that a peer offers: only a sealed file of the right size is mapped, and none is kept."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from lab import HIDDEN, Server, assert_right, eventually, identity, random_rows, reference
from raw import Raw, framed

from afd_patch.connectors import shared_memory, wire
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.retry import RetryingConnector
from afd_patch.connectors.wire import DType, Header, Kind

Start = Callable[..., Server]
SIZE = shared_memory.file_bytes(identity())


@pytest.fixture
def server(unix: Endpoint, start: Start) -> Server:
    return start(unix, frame_timeout=0.5)


@pytest.fixture
def bystander(server: Server) -> Iterator[RetryingConnector]:
    client = server.client()
    assert_right(client)
    fds, areas, lines = server.fds(), server.shared_areas(), len(server.log())
    yield client
    assert_right(client)
    assert client.repeats == 0
    assert eventually(lambda: server.fds() == fds), (server.fds(), fds)
    assert server.shared_areas() == areas
    assert len(server.log()) - lines == 1
    client.close()


def memory(size: int = SIZE, seals: int = shared_memory._SEALS, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("afd_patch", flags)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(fd, SIZE)
    return fd


OFFERS: dict[str, tuple[Callable[[], list[int]], object]] = {
    "nothing": (list, SIZE),
    "not sealed": (lambda: [memory(seals=0)], SIZE),
    "may shrink": (lambda: [memory(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)], SIZE),
    "may be sealed on": (lambda: [memory(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)], SIZE),
    "not writable": (lambda: [memory(seals=shared_memory._SEALS | fcntl.F_SEAL_WRITE)], SIZE),
    "empty": (lambda: [memory(0)], SIZE),
    "too small": (lambda: [memory(SIZE // 2)], SIZE),
    "too large": (lambda: [memory(SIZE + mmap.PAGESIZE)], SIZE),
    "a plain file": (lambda: [plain_file()], SIZE),
    "an event counter": (lambda: [os.eventfd(0)], SIZE),
    "a folder": (lambda: [os.open("/", os.O_RDONLY)], SIZE),
    "a device": (lambda: [os.open("/dev/zero", os.O_RDWR)], SIZE),
    "two files": (lambda: [memory(), memory()], SIZE),
    "fifty files": (lambda: [memory() for _ in range(50)], SIZE),
    "another size": (lambda: [memory()], SIZE * 2),
    "size 0": (lambda: [memory(0)], 0),
    "size -1": (lambda: [memory()], -1),
    "size 10**12": (lambda: [memory()], 10**12),
    "size 10**4000": (lambda: [memory()], 10**4000),
    "size 1.0": (lambda: [memory()], float(SIZE)),
    "size true": (lambda: [memory()], True),
    "size as text": (lambda: [memory()], str(SIZE)),
    "size as a list": (lambda: [memory()], [SIZE] * 5000),
}


@pytest.mark.parametrize("what", OFFERS)
def test_what_is_not_safe_to_map_is_refused(
    unix: Endpoint, server: Server, bystander: RetryingConnector, what: str
) -> None:
    make, claimed = OFFERS[what]
    fds = make()
    peer = Raw(unix)
    peer.hello(fds=fds, shared_memory=claimed)
    answer = peer.rest()
    assert not answer or wire.unpack(answer[: wire.HEADER_SIZE]).kind is Kind.REFUSE
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("begun", [0, 1, 64])
def test_more_than_one_file(unix: Endpoint, server: Server, bystander: RetryingConnector, begun: int) -> None:
    """What came before the second file tells whether there is somebody who understands an answer."""
    frame = wire.text_frame(Kind.HELLO, {"identity": identity().to_json(), "shared_memory": SIZE})
    peer, fds = Raw(unix), [memory(), memory()]
    peer.say(frame[:begun])
    time.sleep(0.1)
    socket.send_fds(peer.socket, [frame[begun:]], fds)
    answer = peer.rest()
    if begun < len(wire.MAGIC):
        assert answer == b""
    else:
        assert wire.unpack(answer[: wire.HEADER_SIZE]).kind is Kind.REFUSE
    server.wait_for_line("dropped: the peer sent more files than the one")
    for fd in fds:
        os.close(fd)


def test_a_file_with_every_byte(unix: Endpoint, server: Server, bystander: RetryingConnector) -> None:
    """Files are counted over the whole handshake, so they cannot use up the server's descriptors."""
    frame = wire.text_frame(Kind.HELLO, {"identity": identity().to_json(), "shared_memory": SIZE})
    peer, fd = Raw(unix), memory()
    with suppress(ConnectionError):
        for byte in frame:
            socket.send_fds(peer.socket, [bytes([byte])], [fd])
    os.close(fd)
    peer.rest()
    (line,) = server.lines("dropped")
    assert "more files than the one" in line


def test_shared_memory_claimed_over_tcp(tcp: Endpoint, start: Start) -> None:
    server = start(tcp)
    peer = Raw(tcp)
    peer.hello(shared_memory=SIZE)
    peer.rest()
    assert len(server.wait_for_line("dropped")) == 1
    assert_right(server.client())


def test_files_after_the_handshake_are_not_kept(unix: Endpoint, server: Server, bystander: RetryingConnector) -> None:
    peer, fd = Raw(unix), memory()
    peer.welcome()
    call = Header(Kind.CALL, peer.session, 1, 1, 0, 0, DType.BFLOAT16, 1, HIDDEN, wire.FLAG_SHARED_MEMORY)
    before = server.fds()
    for _ in range(20):
        socket.send_fds(peer.socket, [call.pack()], [fd])
        assert peer.frame()[0].kind is Kind.REPLY
    assert server.fds() == before
    os.close(fd)
    peer.close()
    server.wait_for_line("left after")


def test_rows_over_a_unix_socket_without_shared_memory(unix: Endpoint, start: Start) -> None:
    """It is an offer: a peer that makes none is served over the socket, even when a file came along."""
    start(unix)
    fd = memory()
    for fds in (None, [fd]):
        peer = Raw(unix)
        peer.hello(fds=fds)
        session = peer.frame()[0].session
        rows = random_rows(3)
        payload = rows.view(torch.uint8).numpy().tobytes()
        peer.say(framed(Header(Kind.CALL, session, dtype=DType.BFLOAT16, rows=3, width=HIDDEN), payload))
        assert peer.frame()[1] == reference(0, rows).view(torch.uint8).numpy().tobytes()
        peer.close()
    os.close(fd)


def test_memory_cannot_be_taken_away_while_it_is_used(unix: Endpoint, server: Server) -> None:
    fd = memory()
    peer = Raw(unix)
    peer.hello(fds=[fd], shared_memory=SIZE)
    peer.frame()
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    peer.close()
