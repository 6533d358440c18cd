"""The wire format: a fixed 64-byte header, then the payload. No pickle, ever.

Everything is little-endian. A header is checked completely before a byte of payload is read or allocated. Magic,
version and the checksum at the end of the header stay where they are in every version of the protocol. The
handshake (``HELLO``, ``WELCOME``, ``REFUSE``, ``READY``) carries a small JSON object; ``CALL`` and ``REPLY`` carry
rows, or nothing where the rows travel in shared memory; ``ERROR`` carries a sentence. docs/wire-protocol.md has the
layout as a table.
"""

from __future__ import annotations

import json
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

import xxhash

from afd_patch.errors import ProtocolError

MAGIC = b"AFD1"
PROTOCOL_VERSION = 2

_FIELDS = struct.Struct("<4sHBBIHHQQQIIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_SIZE = _FIELDS.size + _CHECKSUM.size

#: Largest handshake or error text that is accepted, in bytes.
MAX_TEXT = 64 * 1024


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # attention -> FFN: who I am and what I expect
    WELCOME = 2  # FFN -> attention: we belong together; READY follows when the weights are loaded
    REFUSE = 3  # either way: we do not, with the reason; the connection closes
    READY = 4  # FFN -> attention: calls are answered from now on
    CALL = 5  # attention -> FFN: rows for one layer
    REPLY = 6  # FFN -> attention: the result of one call
    ERROR = 7  # FFN -> attention: the call failed, with the reason


class DType(IntEnum):
    """Element types that cross, by their code on the wire."""

    NONE = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3


_KINDS = {int(kind): kind for kind in Kind}
_DTYPES = {int(dtype): dtype for dtype in DType}

#: ``flags``: the rows are in the connection's shared memory and no payload follows.
FLAG_SHARED_MEMORY = 1


class DamagedError(ProtocolError):
    """Bytes were changed on their way; sending them again helps."""


class VersionError(ProtocolError):
    """The peer speaks another version of the protocol."""


class Header(NamedTuple):
    """One frame's header.

    ``session`` is given by the server to one connection; ``transaction`` counts the forwards of the caller and
    ``call`` its calls, so a late or repeated reply is recognised. ``rows`` and ``width`` are the shape of the
    payload in elements, ``payload`` its length in bytes and ``check`` its ``payload_check``.
    """

    kind: Kind
    session: int = 0
    transaction: int = 0
    call: int = 0
    layer: int = 0
    stage: int = 0
    dtype: DType = DType.NONE
    rows: int = 0
    width: int = 0
    flags: int = 0
    payload: int = 0
    check: int = 0

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            MAGIC, PROTOCOL_VERSION, self.kind, self.dtype, self.flags, self.layer, self.stage, self.session,
            self.transaction, self.call, self.rows, self.width, self.payload, self.check,
        )  # fmt: skip
        return fields + _CHECKSUM.pack(zlib.crc32(fields))


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data`` (exactly ``HEADER_SIZE`` bytes); raises ``ProtocolError`` when it is none."""
    (
        magic, version, kind, dtype, flags, layer, stage, session,
        transaction, call, rows, width, payload, check,
    ) = _FIELDS.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise ProtocolError(f"not an AFD frame: it starts with {magic!r}")
    if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(memoryview(data)[: _FIELDS.size]):
        raise DamagedError("the header was damaged on its way: its checksum is wrong")
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"AFD protocol {version} from the peer, {PROTOCOL_VERSION} here; use the same afd_patch on both sides"
        )
    try:
        return Header(
            _KINDS[kind], session, transaction, call, layer, stage, _DTYPES[dtype], rows, width, flags, payload, check
        )
    except KeyError:
        raise ProtocolError(f"unknown frame kind {kind} or dtype {dtype}") from None


def payload_check(data: bytes | bytearray | memoryview) -> int:
    """A 32-bit check of a payload, the low half of its XXH3: as fast as memory; shared memory needs none."""
    return xxhash.xxh3_64_intdigest(data) & 0xFFFF_FFFF


def verify_payload(header: Header, data: bytes | bytearray | memoryview) -> None:
    """Raise ``ProtocolError`` when ``data`` is not the payload that ``header`` was sent with."""
    if payload_check(data) != header.check:
        raise DamagedError("the payload was damaged on its way: its checksum is wrong")


def check_start(data: bytes | bytearray | memoryview) -> None:
    """Raise ``ProtocolError`` when ``data``, the first bytes of a header, cannot become one."""
    start = bytes(data[: len(MAGIC)])
    if len(start) == len(MAGIC) and start != MAGIC:
        raise ProtocolError(f"not an AFD frame: it starts with {start!r}")


def text_frame(
    kind: Kind, content: dict[str, Any], *, session: int = 0, transaction: int = 0, call: int = 0, layer: int = 0,
    stage: int = 0,
) -> bytes:  # fmt: skip
    """A frame that carries JSON."""
    body = json.dumps(content, sort_keys=True).encode()
    if len(body) > MAX_TEXT:
        raise ProtocolError(f"{kind.name} would be {len(body)} bytes, more than {MAX_TEXT}")
    return (
        Header(kind, session, transaction, call, layer, stage, payload=len(body), check=payload_check(body)).pack()
        + body
    )


def parse_text(header: Header, body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object of the handshake or error frame with ``header``."""
    verify_payload(header, body)
    try:
        content = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"handshake is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ProtocolError("handshake is not a JSON object")
    return content
