"""What hivemind 1.1.12 keeps of running calls, mended: one late answer ended all calls of a process for good, and each
request that was cancelled stayed for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from hivemind.p2p import P2P


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
