"""A bound on nested msgpack extension types, which hivemind 1.1.12 lacks: 714 bytes of them end its process by SIGSEGV.

``MSGPackSerializer._decode_ext_types`` unpacks the payload of an extension type with itself as the hook, so each level
is one more recursion through C, without Python's limit. Every DHT request, answer and stored value is unpacked so.
"""

from __future__ import annotations

import threading
from typing import Any

from hivemind.utils import MSGPackSerializer

LEVELS = 3  # the DHT's own messages have two: a dictionary of records, with tuples in it


class _Depth(threading.local):
    levels = 0


def bound_nesting() -> None:
    """From now on deeper nesting and unknown types raise ``ValueError``. A second call changes nothing."""
    decode: Any = MSGPackSerializer._decode_ext_types
    if hasattr(decode, "bounded"):
        return
    depth = _Depth()
    known = (MSGPackSerializer._TUPLE_EXT_TYPE_CODE, *MSGPackSerializer._ext_type_codes)

    def bounded(code: int, data: bytes) -> object:
        if code not in known or depth.levels >= LEVELS:
            raise ValueError(f"extension type {code} at level {depth.levels + 1} of nesting")
        depth.levels += 1
        try:
            return decode(code, data)
        finally:
            depth.levels -= 1

    bounded.bounded = True  # type: ignore[attr-defined]
    MSGPackSerializer._decode_ext_types = bounded
