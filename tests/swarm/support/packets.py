"""Bytes that no honest node sends to a DHT."""

from __future__ import annotations

import msgpack
from hivemind.utils import MSGPackSerializer

TUPLE: int = MSGPackSerializer._TUPLE_EXT_TYPE_CODE


def nested(levels: int, code: int = TUPLE) -> bytes:
    """An extension type in an extension type, ``levels`` deep."""
    data: bytes = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(code, data))
    return data
