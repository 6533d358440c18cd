"""Tens of thousands of random and mutated frames, the same ones every time: nothing breaks, nothing grows."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lab import HIDDEN, SOON, Forked, Server, assert_right, eventually, identity, random_rows, reference
from raw import Raw, framed, sealed

from afd_patch.connectors import wire
from afd_patch.connectors.client import Channel
from afd_patch.connectors.endpoint import Endpoint
from afd_patch.connectors.wire import HEADER_SIZE, DType, Header, Kind
from afd_patch.errors import ConnectorError

Start = Callable[..., Server]
#: Where a header's fields are, and how wide they are.
FIELDS = (
    (0, 4), (4, 2), (6, 1), (7, 1), (8, 4), (12, 2), (14, 2), (16, 8),
    (24, 8), (32, 8), (40, 4), (44, 4), (48, 8), (56, 4), (60, 4),
)  # fmt: skip
TEMPTING = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 513, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
WHO = identity(layers=6)  # without those at which the server does special things
HELLO = wire.text_frame(Kind.HELLO, {"identity": WHO.to_json()})


def mutate(dice: random.Random, frame: bytes) -> bytes:
    """``frame`` with something wrong: bits, a field, its length, or everything."""
    how = dice.randrange(7)
    data = bytearray(frame)
    if how == 0:
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how in (1, 2):
        place, size = dice.choice(FIELDS)
        value = dice.choice(TEMPTING) if how == 1 else dice.getrandbits(64)
        data[place : place + size] = struct.pack("<Q", value)[:size]
    elif how == 3:
        del data[dice.randrange(len(data)) :]
    elif how == 4:
        at = dice.randrange(len(data))
        data[at:at] = dice.randbytes(dice.randint(1, 80))
    elif how == 5:
        data = bytearray(dice.randbytes(dice.randint(1, 300)))
    else:
        data[HEADER_SIZE:] = dice.randbytes(max(0, len(data) - HEADER_SIZE))
    # Half of what is long enough gets right checksums again, to reach what is behind them.
    if len(data) < HEADER_SIZE or dice.random() < 0.5:
        return bytes(data)
    data[56:60] = wire.payload_check(data[HEADER_SIZE:]).to_bytes(4, "little")
    return sealed(data)


def call_frame(session: int, dice: random.Random) -> bytes:
    rows = dice.randint(1, 4)
    payload = random_rows(rows).view(torch.uint8).numpy().tobytes()
    return framed(Header(Kind.CALL, session, 1, 1, dice.randrange(6), 0, DType.BFLOAT16, rows, HIDDEN), payload)


def send_frames(endpoint: Endpoint, dice: random.Random, frames: int, welcome: bool) -> None:
    """``frames`` mutated frames over as many connections as it takes."""
    sent = 0
    while sent < frames:
        peer = Raw(endpoint)
        with contextlib.suppress(OSError):
            if welcome:
                peer.say(HELLO)
                peer.session = peer.frame()[0].session
                peer.say(call_frame(peer.session, dice))
            for _ in range(4 if welcome else 1):
                peer.say(mutate(dice, call_frame(peer.session, dice) if welcome else HELLO))
                sent += 1
            peer.socket.shutdown(socket.SHUT_WR)
        peer.rest()  # whatever it was, the server closes the connection


def test_frames_against_the_server(endpoint: Endpoint, start: Start) -> None:
    server = start(endpoint, WHO, frame_timeout=0.3)
    bystander = server.client()
    assert_right(bystander)
    fds = server.fds()
    dice = random.Random(20251130)
    send_frames(endpoint, dice, 400, welcome=False)
    send_frames(endpoint, dice, 400, welcome=True)
    rss = server.rss()
    for _ in range(10):
        send_frames(endpoint, dice, 1500, welcome=False)
        send_frames(endpoint, dice, 1500, welcome=True)
        assert_right(bystander)
    assert bystander.repeats == 0
    assert eventually(lambda: server.fds() == fds)
    assert server.rss() - rss < 8 << 20
    assert not server.lines("Traceback"), server.log()[:60]
    assert not server.lines("defect")
    assert_right(server.client())
    bystander.close()


def answer_with_nonsense(endpoint: Endpoint, seed: int, in_call: bool) -> None:
    """A server whose answer to the handshake, or to a call, is a mutated one; never returns."""
    dice = random.Random(seed)
    listener = socket.create_server((endpoint.host, endpoint.port))
    logging.getLogger().info("listening")
    welcome = wire.text_frame(Kind.WELCOME, {"ready": True, "identity": WHO.to_json()}, session=9)
    payload = reference(1, random_rows(2)).view(torch.uint8).numpy().tobytes()
    while True:
        sock, _ = listener.accept()
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.recv(1 << 16)
            if in_call:
                sock.sendall(welcome)
                request = sock.recv(1 << 16)
                called = wire.unpack(request[:HEADER_SIZE])
                header = framed(called._replace(kind=Kind.REPLY), payload)[:HEADER_SIZE]
                if dice.random() < 0.2:
                    sock.sendall((header + payload)[: dice.randrange(HEADER_SIZE + len(payload))])
                else:
                    sock.sendall(mutate(dice, header) + payload)
            else:
                sock.sendall(mutate(dice, welcome))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
        sock.close()


@pytest.mark.parametrize("in_call", [False, True], ids=["handshakes", "replies"])
def test_answers_against_the_client(tcp: Endpoint, folder: Path, in_call: bool) -> None:
    server = Forked(lambda: answer_with_nonsense(tcp, 7, in_call), folder / "nonsense.log")
    rows = random_rows(2)
    right = reference(1, rows)
    agreed = failed = 0
    try:
        server.wait_for_line("listening")
        before = own_rss()
        for number in range(5000):
            channel = Channel(tcp, WHO)
            out = torch.full_like(rows, 5.0)
            try:
                channel.open(SOON)
                deadline = time.monotonic() + SOON
                channel.call(1, rows, out, stage=0, transaction=3, call=number, deadline=deadline, spin=0.0)
            except ConnectorError:
                failed += 1
                assert (out == 5.0).all() or in_call
            else:
                agreed += 1
                assert torch.equal(out, right)  # only a header that was left as it was is believed
            channel.close()
        assert failed > 4000
        assert agreed < 1000
        assert own_rss() - before < 16 << 20
    finally:
        log = server.log()
        server.kill()
    assert len(log) == 1, log


def own_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_same_seed_makes_the_same_frames() -> None:
    one, two = random.Random(1), random.Random(1)
    assert [mutate(one, HELLO) for _ in range(50)] == [mutate(two, HELLO) for _ in range(50)]
