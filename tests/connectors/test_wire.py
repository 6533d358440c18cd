"""The header: every field crosses, and anything else than a header is refused with what is wrong."""

from __future__ import annotations

import json
import random
import struct
import zlib
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
        (4, struct.pack("<H", 9), "AFD protocol 9 from the peer, 1 here"),
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


@pytest.mark.parametrize("bit", range(32, 512))
def test_every_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    data = bytearray(FULL.pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(wire.DamagedError):
        wire.unpack(data)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1001])
def test_every_flipped_bit_of_a_payload_is_noticed(size: int) -> None:
    payload = bytearray(random.Random(size).randbytes(size))
    right = wire.payload_check(payload)
    for bit in range(8 * size):
        payload[bit // 8] ^= 1 << bit % 8
        assert wire.payload_check(payload) != right
        payload[bit // 8] ^= 1 << bit % 8
    assert wire.payload_check(payload) == right
    assert wire.payload_check(b"") == 0


def test_another_version_is_told_from_nonsense() -> None:
    data = bytearray(FULL.pack())
    data[4] = 2
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
