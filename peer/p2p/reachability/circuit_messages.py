"""The few messages of libp2p's circuit relay v2 that a relay needs, as bytes.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md: length-delimited protobuf, written by hand because
two fields of two messages are all that is used. Next station: relay.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peer.p2p.stream import BadMessage

HOP = "/libp2p/circuit/relay/0.2.0/hop"  # the caller to the relay
STOP = "/libp2p/circuit/relay/0.2.0/stop"  # the relay to the called
RESERVE, CONNECT, STATUS = 0, 1, 2  # kinds of a hop message
STOP_CONNECT, STOP_STATUS = 0, 1  # kinds of a stop message
OK, RESERVATION_REFUSED, LIMIT_EXCEEDED, CONNECTION_FAILED, NO_RESERVATION = 100, 200, 201, 203, 204
CAP = 4096  # bytes of a message
LONGEST_ID = 64  # bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Hop:
    """What a caller asks of a relay; ``peer``: the id (bytes) of the one it wants."""

    kind: int
    peer: bytes


async def read_hop(reader: asyncio.StreamReader) -> Hop:
    """Raises :class:`BadMessage`, ``asyncio.IncompleteReadError`` or ``OSError``; the caller sets the deadline."""
    numbers, parts = _fields(await _message(reader))
    _, inside = _fields(parts.get(2, b""))
    peer = inside.get(1, b"")
    if len(peer) > LONGEST_ID:
        raise BadMessage("not a peer id")
    return Hop(numbers.get(1, RESERVE), peer)


async def read_stop_status(reader: asyncio.StreamReader) -> int:
    """The status in the answer of the called."""
    numbers, _ = _fields(await _message(reader))
    if numbers.get(1, STOP_CONNECT) != STOP_STATUS:
        raise BadMessage("not a status")
    return numbers.get(4, 0)


def hop_status(status: int) -> bytes:
    """The relay's answer to a caller. It has no limit in it: libp2p would keep most protocols off a limited circuit."""
    return _delimited(_number(1, STATUS) + _number(5, status))


def stop_connect(caller: bytes) -> bytes:
    """Tells the called who wants it; ``caller``: a peer id (bytes)."""
    return _delimited(_number(1, STOP_CONNECT) + _part(2, _part(1, caller)))


async def _message(reader: asyncio.StreamReader) -> bytes:
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise BadMessage("a circuit message is too long")
    if size > CAP:
        raise BadMessage("a circuit message is too long")
    return await reader.readexactly(size)


def _fields(data: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Numbers and bytes by field number, the last of each; raises :class:`BadMessage`."""
    numbers: dict[int, int] = {}
    parts: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            numbers[number], at = _varint(data, at)
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise BadMessage("not protobuf")
        if at + size > len(data):
            raise BadMessage("protobuf is cut off")
        if wire == _BYTES:
            parts[number] = data[at : at + size]
        at += size
    return numbers, parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    raise BadMessage("protobuf is cut off")


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _encoded(field << 3 | _VARINT) + _encoded(value)


def _part(field: int, value: bytes) -> bytes:
    return _encoded(field << 3 | _BYTES) + _encoded(len(value)) + value


def _delimited(message: bytes) -> bytes:
    return _encoded(len(message)) + message
