"""Length-delimited protobuf of libp2p's own protocols: only the fields that are used; protobuf skips the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from peer.p2p.stream import BadMessage

INT_FIELD, BYTES_FIELD = FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_BYTES
MANY = FieldDescriptorProto.LABEL_REPEATED
ONE = FieldDescriptorProto.LABEL_OPTIONAL

Field = tuple[str, int, int | str, int]  # name, number, type (or the name of a message), label


def message_classes(package: str, fields: Mapping[str, Sequence[Field]]) -> dict[str, Any]:
    """The classes by name. Kinds and statuses are plain numbers, so an unknown one is kept."""
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, rows in fields.items():
        message = DescriptorProto(name=name)
        for field, number, kind, label in rows:
            row = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                row.type, row.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                row.type = kind
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in fields}


async def read_delimited(kind: Any, reader: asyncio.StreamReader, cap: int) -> Any:
    """A message of at most ``cap`` bytes.

    Raises :class:`BadMessage`, ``asyncio.IncompleteReadError`` or ``OSError``; the caller sets the deadline."""
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise BadMessage("a message is too long")
    if size > cap:
        raise BadMessage("a message is too long")
    try:
        return kind.FromString(await reader.readexactly(size))
    except DecodeError:
        raise BadMessage("not protobuf") from None


def delimited(message: Any) -> bytes:
    """A message with its length before it."""
    data: bytes = message.SerializeToString()
    left, size = len(data), b""
    while left >= 0x80:
        size += bytes([left & 0x7F | 0x80])
        left >>= 7
    return size + bytes([left]) + data
