"""What the DHT of any swarm may hold: short texts under short texts, for a short time.

A node checks each record before it stores it and before it believes an answer, and unpacks nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord

from peer import clock

SUBKEY_BYTES = 1024  # a peer id, its public key and, in an invited swarm, its certificate
CLOCKS = 6.0  # seconds by which two clocks may differ: hivemind allows 3 to each
SIGNATURE = re.compile(rb"\[signature:[A-Za-z0-9+/=]+\]")  # what follows a signed value
_PLAIN = {"max_array_len": 0, "max_map_len": 0, "max_ext_len": 0}  # texts, bytes and numbers
_DICTIONARY = DHTProtocol.serializer._ext_types[DictionaryDHTValue]


@dataclass(frozen=True)
class RecordLimit:
    """``size`` in bytes, with a signature; ``lifetime`` in seconds from now. ``accepts``: is the text good?"""

    size: int
    lifetime: float
    accepts: Callable[[str], bool] = lambda text: True


RECORD = RecordLimit(2048, 60.0)


def within_limits(record: DHTRecord, plain: Mapping[bytes, RecordLimit]) -> bool:
    """``plain``: limits of the only keys that hold a value without subkeys, by the key's bytes."""
    has_subkey = record.subkey != DHTProtocol.IS_REGULAR_VALUE
    limit = RECORD if has_subkey else plain.get(record.key)
    if limit is None or len(record.value) > limit.size or len(record.subkey) > SUBKEY_BYTES:
        return False
    if not record.expiration_time <= clock.unix() + limit.lifetime + CLOCKS:
        return False
    if has_subkey and subkey_text(record.subkey) is None:
        return False
    text, rest = split_text(record.value)
    # else who strips the signature unpacks more than the text
    whole = not rest or (has_subkey and SIGNATURE.fullmatch(rest) is not None)
    return text is not None and whole and limit.accepts(text)


def subkey_text(packed: bytes) -> str | None:
    """The text of a packed subkey; ``None`` when it is none. The same text packed in another way is none either: a node
    keeps the text alone, and who reads the record packs it again for the signature, which would be false.
    """
    text, _ = split_text(packed)
    return text if text is not None and DHTProtocol.serializer.dumps(text) == packed else None


def split_text(packed: bytes) -> tuple[str | None, bytes]:
    """The text at the start of a packed value, or ``None``, and what follows it. Nothing else is unpacked."""
    unpacker = msgpack.Unpacker(**_PLAIN, max_bin_len=0)
    unpacker.feed(packed)
    try:
        found = unpacker.unpack()
        return (found, packed[unpacker.tell() :]) if isinstance(found, str) else (None, packed)
    except (ValueError, msgpack.exceptions.UnpackException):
        return None, packed


def rows_of(packed: bytes) -> Iterator[tuple[Any, Any, Any]]:
    """Subkey, value and expiration of each record in a packed dictionary, until one cannot be read.

    hivemind would unpack all at once and look each subkey up. Who makes their hashes collide, as those of tuples, or
    sends a hundred thousand empty lists, which Python's collector goes through, holds the event loop.
    """
    # RecursionError: of msgpack's Python code before 1.2
    with suppress(ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        code, data = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
        if code != _DICTIONARY:
            return
        frame = msgpack.Unpacker()  # it reads headers and skips, and builds nothing
        frame.feed(data)

        def plain() -> Any:
            start = frame.tell()
            frame.skip()
            return msgpack.unpackb(data[start : frame.tell()], **_PLAIN)

        if frame.read_array_header() != 3:
            return
        frame.skip(), frame.skip()  # its size and its expiration
        for _ in range(frame.read_array_header()):
            if frame.read_array_header() != 3:
                return
            yield plain(), plain(), plain()
