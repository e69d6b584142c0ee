"""What hivemind 1.1.12 gets wrong, mended. 714 bytes of nested extension types end its process by SIGSEGV. One late
answer ends all calls of a process for good. Each request that was cancelled stays for ever.

``MSGPackSerializer._decode_ext_types`` unpacks the payload of an extension type with itself as the hook, so each level
is one more recursion through C, without Python's limit. Every DHT request, answer and stored value is unpacked so.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from uuid import UUID

from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer

LEVELS = 3  # the DHT's own messages have two: a dictionary of records, with tuples in it


class _Depth(threading.local):
    levels = 0


def bound_nesting() -> None:
    """From now on deeper nesting and unknown types raise ``ValueError``."""
    decode: Any = MSGPackSerializer._decode_ext_types
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

    MSGPackSerializer._decode_ext_types = bounded


class _Pending(dict[UUID, "asyncio.Future[Any]"]):
    """Calls that wait for an answer, of which those given up are not ``in`` it: to answer one raises in the task that
    reads all answers. From Python 3.12 on both fall together whenever the process has been frozen for a time-out.
    """

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()  # type: ignore[index]


class _Running(dict[UUID, "asyncio.Task[None]"]):
    """Requests that are being answered, until they end: hivemind forgets to take out one that was cancelled."""

    def __setitem__(self, call_id: UUID, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def mend_calls(p2p: P2P) -> None:
    """For a new client of the daemon, before its first call."""
    control = p2p._client.control
    control._pending_calls, control._handler_tasks = _Pending(control._pending_calls), _Running()


def calls_have_ended(p2p: P2P) -> bool:
    """No call is answered any more."""
    reader = p2p._client.control._read_task
    return reader is not None and reader.done()
