"""The messages of libp2p's circuit relay v2 that a relay needs, as bytes.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md: length-delimited protobuf. Only the fields that a relay
uses are described here; protobuf skips the others.
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from peer.p2p.stream import BadMessage

HOP = "/libp2p/circuit/relay/0.2.0/hop"  # the caller to the relay
STOP = "/libp2p/circuit/relay/0.2.0/stop"  # the relay to the called
RESERVE, CONNECT, STATUS = 0, 1, 2  # kinds of a hop message
STOP_CONNECT, STOP_STATUS = 0, 1  # kinds of a stop message
OK, RESERVATION_REFUSED, LIMIT_EXCEEDED, CONNECTION_FAILED, NO_RESERVATION = 100, 200, 201, 203, 204
CAP = 4096  # bytes of a message
LONGEST_ID = 64  # bytes


def _messages() -> dict[str, Any]:
    """The classes by name. Kinds and statuses are plain numbers, so an unknown one is kept."""
    kinds = FieldDescriptorProto
    fields = {
        "Peer": [("id", 1, kinds.TYPE_BYTES)],
        "HopMessage": [("type", 1, kinds.TYPE_INT32), ("peer", 2, "Peer"), ("status", 5, kinds.TYPE_INT32)],
        "StopMessage": [("type", 1, kinds.TYPE_INT32), ("peer", 2, "Peer"), ("status", 4, kinds.TYPE_INT32)],
    }
    file = FileDescriptorProto(name="circuit.proto", package="circuit", syntax="proto2")
    for name, rows in fields.items():
        message = DescriptorProto(name=name)
        for field, number, kind in rows:
            row = message.field.add(name=field, number=number, label=kinds.LABEL_OPTIONAL)
            if isinstance(kind, str):
                row.type, row.type_name = kinds.TYPE_MESSAGE, f".circuit.{kind}"
            else:
                row.type = kind
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"circuit.{name}")) for name in fields}


_CLASSES = _messages()


async def read_hop(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The kind of a caller's message, and the id of the peer that it wants.

    Raises :class:`BadMessage`, ``asyncio.IncompleteReadError`` or ``OSError``; the caller sets the deadline."""
    message = await _read("HopMessage", reader)
    if len(message.peer.id) > LONGEST_ID:
        raise BadMessage("not a peer id")
    return message.type, message.peer.id


async def read_stop_status(reader: asyncio.StreamReader) -> int:
    """The status in the called side's answer."""
    message = await _read("StopMessage", reader)
    if message.type != STOP_STATUS:
        raise BadMessage("not a status")
    return int(message.status)


def hop_status(status: int) -> bytes:
    """The relay's answer to a caller, without a limit: libp2p allows few protocols on a limited circuit."""
    return _delimited(_CLASSES["HopMessage"](type=STATUS, status=status))


def stop_connect(caller: bytes) -> bytes:
    """Tells the called side the id (bytes) of the ``caller``."""
    return _delimited(_CLASSES["StopMessage"](type=STOP_CONNECT, peer={"id": caller}))


async def _read(name: str, reader: asyncio.StreamReader) -> Any:
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
    try:
        return _CLASSES[name].FromString(await reader.readexactly(size))
    except DecodeError:
        raise BadMessage("not protobuf") from None


def _delimited(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    size = bytes([len(data)]) if len(data) < 0x80 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return size + data
