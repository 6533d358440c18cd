"""The header: every field crosses, and anything else than a header is refused with what is wrong."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from raw import framed, sealed

from afd_patch.connectors import wire
from afd_patch.connectors.wire import DType, Header, Kind
from afd_patch.errors import ProtocolError

FULL = Header(
    Kind.REPLY, session=2**63 + 1, transaction=2**64 - 1, call=3, layer=60, stage=1, dtype=DType.FLOAT32,
    rows=2**32 - 1, width=7168, flags=wire.FLAG_SHARED_MEMORY, payload=2**40, check=2**32 - 6,
)  # fmt: skip


def test_the_header_has_64_bytes() -> None:
    assert wire.HEADER_SIZE == 64 == len(FULL.pack())


def test_every_field_crosses() -> None:
    assert wire.unpack(FULL.pack()) == FULL


@pytest.mark.parametrize("field", Header._fields)
def test_every_field_has_a_place_of_its_own(field: str) -> None:
    other: dict[str, Any] = {"kind": Kind.READY, "dtype": DType.FLOAT16}
    changed = Header(Kind.CALL)._replace(**{field: other.get(field, 1)})
    assert wire.unpack(changed.pack()) == changed
    assert changed.pack() != Header(Kind.CALL).pack()


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dtype", DType)
def test_every_kind_and_dtype_crosses(kind: Kind, dtype: DType) -> None:
    header = wire.unpack(Header(kind, dtype=dtype).pack())
    assert header.kind is kind
    assert header.dtype is dtype


def test_little_endian_at_fixed_places() -> None:
    data = FULL.pack()
    assert data[:4] == b"AFD1"
    assert struct.unpack_from("<HBB", data, 4) == (wire.PROTOCOL_VERSION, Kind.REPLY, DType.FLOAT32)
    assert struct.unpack_from("<QI", data, 48) == (2**40, 2**32 - 6)
    assert struct.unpack_from("<I", data, 60) == (zlib.crc32(data[:60]),)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, b"HTTP", "HTTP"),
        (4, struct.pack("<H", 9), "AFD protocol 9 from the peer, 2 here"),
        (6, b"\x00", "kind 0"),
        (6, b"\xff", "kind 255"),
        (7, b"\x09", "dtype 9"),
    ],
)
def test_a_wrong_field_is_refused_with_what_is_wrong(place: int, value: bytes, says: str) -> None:
    data = bytearray(FULL.pack())
    data[place : place + len(value)] = value
    with pytest.raises(ProtocolError, match=says):
        wire.unpack(sealed(data))


@pytest.mark.parametrize(
    "header", [FULL, Header(Kind.HELLO), Header(Kind.CALL, check=1)], ids=["full", "empty", "call"]
)
def test_every_flipped_bit_of_a_header_is_noticed(header: Header) -> None:
    for bit in range(8 * wire.HEADER_SIZE):
        data = bytearray(header.pack())
        data[bit // 8] ^= 1 << bit % 8
        # Without the magic it may be anything, and is not told from what never was a frame.
        error = wire.DamagedError if bit >= 8 * len(wire.MAGIC) else ProtocolError
        with pytest.raises(error) as raised:
            wire.unpack(data)
        assert type(raised.value) is error


def test_two_flipped_bits_of_a_header_are_noticed() -> None:
    frame, dice = FULL.pack(), random.Random(5)
    for _ in range(5000):
        data = bytearray(frame)
        for bit in dice.sample(range(32, 512), 2):
            data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.DamagedError):
            wire.unpack(data)


@pytest.mark.parametrize(
    ("size", "check"), [(0, 0x38D394C2), (1, 0x074EECDB), (17, 0x6A78E347), (241, 0x0B821A67), (4096, 0x7C3BC740)]
)
def test_the_check_of_a_payload(size: int, check: int) -> None:
    """Fixed values, so that both sides of a wire agree whatever release of the library they have."""
    payload = bytes(n * n % 251 for n in range(size))
    assert wire.payload_check(payload) == check
    assert wire.payload_check(memoryview(bytearray(b"x" + payload))[1:]) == check  # at any address


@pytest.mark.parametrize("size", [1, 7, 8, 9, 15, 16, 64, 1001])
@pytest.mark.parametrize(
    "what", [bytes, lambda size: b"\xff" * size, random.Random(1).randbytes], ids=["0", "1", "any"]
)
def test_every_flipped_bit_of_a_payload_is_noticed(size: int, what: Callable[[int], bytes]) -> None:
    payload = bytearray(what(size))
    right = wire.payload_check(payload)
    for bit in range(8 * size):
        payload[bit // 8] ^= 1 << bit % 8
        assert wire.payload_check(payload) != right
        payload[bit // 8] ^= 1 << bit % 8
    assert wire.payload_check(payload) == right


@pytest.mark.parametrize("size", [9, 12, 15, 1001])
def test_a_tail_that_changed_places_is_noticed(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    right, tail = wire.payload_check(payload), size % 8
    assert wire.payload_check(payload[-tail:] + payload[:-tail]) != right
    assert wire.payload_check(payload[:-tail] + payload[-tail:][::-1]) != right or tail == 1
    assert wire.payload_check(payload[:-tail]) != right


def test_changes_that_would_cancel_in_a_sum_are_noticed() -> None:
    payload, dice = bytearray(random.Random(3).randbytes(4096)), random.Random(4)
    right = wire.payload_check(payload)
    for _ in range(5000):
        word, other = dice.sample(range(512), 2)
        bit = dice.randrange(64)
        places = [(8 * at + bit // 8, 1 << bit % 8) for at in (word, other)]
        for place, mask in places:
            payload[place] ^= mask
        assert wire.payload_check(payload) != right
        for place, mask in places:
            payload[place] ^= mask
    swapped = payload[8:16] + payload[:8] + payload[16:]
    assert wire.payload_check(swapped) != right


def test_rows_with_another_check_are_damaged() -> None:
    rows = random.Random(1).randbytes(4096)
    header = wire.unpack(framed(Header(Kind.CALL), rows)[: wire.HEADER_SIZE])
    wire.verify_payload(header, rows)
    for other in (rows[:-1] + bytes([rows[-1] ^ 128]), b"", rows[:-8], bytes(4096)):
        with pytest.raises(wire.DamagedError, match="payload was damaged"):
            wire.verify_payload(header, other)


def test_another_version_is_told_from_nonsense() -> None:
    data = bytearray(FULL.pack())
    data[4] += 1
    with pytest.raises(wire.VersionError):
        wire.unpack(sealed(data))


def test_text_crosses() -> None:
    frame = wire.text_frame(Kind.ERROR, {"reason": "Grüße \ud800"}, session=4, call=5)
    header = wire.unpack(frame[: wire.HEADER_SIZE])
    assert (header.kind, header.session, header.call) == (Kind.ERROR, 4, 5)
    assert wire.parse_text(header, frame[wire.HEADER_SIZE :]) == {"reason": "Grüße \ud800"}


def test_text_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        wire.text_frame(Kind.HELLO, {"reason": "x" * wire.MAX_TEXT})


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff\xfe\xfd", b"[]", b"3", b"null", b'"x"', b"{", b"[" * 60_000, b'{"a":' * 10_000,
        b'{"a": ' + b"9" * 5000 + b"}", json.dumps({"a": 1}).encode()[:-1],
    ],
    ids=lambda body: repr(body[:8]),
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    header = wire.unpack(framed(Header(Kind.ERROR), body)[: wire.HEADER_SIZE])
    with pytest.raises(ProtocolError):
        wire.parse_text(header, body)


def test_the_start_of_a_header_is_told_from_anything_else() -> None:
    for size in range(wire.HEADER_SIZE):
        wire.check_start(FULL.pack()[:size])
    wire.check_start(b"GET")  # may not be decided yet
    with pytest.raises(ProtocolError, match="GET"):
        wire.check_start(b"GET / HTTP/1.1")
