"""What the DHT of any swarm may hold: short texts under short texts, for a short time.

A node checks each record before it stores it and before it believes an answer, and unpacks nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from peer import clock

SUBKEY_BYTES = 1024  # a peer id and, in an invited swarm, its public key
CLOCKS = 6.0  # seconds by which two clocks may differ: hivemind allows 3 to each
SIGNATURE = b"[signature:"  # what follows a signed value begins so


@dataclass(frozen=True)
class Limit:
    """``size`` in bytes, with a signature; ``lifetime`` in seconds from now."""

    size: int
    lifetime: float


RECORD = Limit(2048, 60.0)


class RecordLimits(RecordValidatorBase):
    """``plain``: limits of the only keys that hold a value without subkeys, by the key's bytes."""

    def __init__(self, plain: Mapping[bytes, Limit] | None = None) -> None:
        self._plain = dict(plain or {})

    def validate(self, record: DHTRecord) -> bool:
        """Is it within the limits?"""
        plain = record.subkey == DHTProtocol.IS_REGULAR_VALUE
        limit = self._plain.get(record.key) if plain else RECORD
        if limit is None or len(record.value) > limit.size or len(record.subkey) > SUBKEY_BYTES:
            return False
        if not record.expiration_time <= clock.unix() + limit.lifetime + CLOCKS:
            return False
        if not plain and _after_text(record.subkey) != b"":
            return False
        rest = _after_text(record.value)
        return rest == b"" or (rest is not None and rest.startswith(SIGNATURE))

    @property
    def priority(self) -> int:
        """Before signatures are checked (10)."""
        return 20


def _after_text(packed: bytes) -> bytes | None:
    """What follows the text at the start; ``None`` when there is no text. Nothing else is unpacked."""
    unpacker = msgpack.Unpacker(max_array_len=0, max_map_len=0, max_ext_len=0, max_bin_len=0)
    unpacker.feed(packed)
    try:
        found = unpacker.unpack()
        return packed[unpacker.tell() :] if isinstance(found, str) else None
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
