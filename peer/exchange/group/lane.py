"""The stream to one member while a group averages: payloads both ways, each acknowledged, and signs of life meanwhile.

Why acknowledged: what was written lies in buffers that hold more than a payload, so only the other side knows that it
is through. A member sends to few others at a time (:func:`turns`): n - 1 flows at once overflow a home line's queue, a
quarter of all packets is sent again, and everybody waits for the flow that lost most.

Each direction is a row of frames: what it is (1 byte), length (4 bytes), bytes. Next station: reduce.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from peer.p2p.payload import send_payload
from peer.p2p.stream import BadMessage, Stream
from peer.rounds.contribution import Readable

PART, GOT, WAITS = 1, 2, 3  # of a payload; a payload is through; nothing to send yet
HEAD = 5  # bytes
CAP = 2 * 2**20  # bytes of a frame
SIGNS = 4  # of life within the time after which a silent stream is given up
IN_FLIGHT = 2**20  # bytes that are sent before any of them is acknowledged: what a line of 100 Mbit/s and 80 ms holds


def turns(size: int) -> asyncio.Semaphore:
    """For all lanes of a member: how many payloads of ``size`` bytes it sends at once, and in which order."""
    return asyncio.Semaphore(max(2, IN_FLIGHT // max(size, 1)))


class Lane:
    """One per member and round. ``stall``: seconds without a byte after which the member is given up.

    Raises what :class:`Stream` does. Three coroutines run beside each other: one sends, one receives, and
    :meth:`acknowledge`.
    """

    def __init__(self, stream: Stream, stall: float) -> None:
        self._stream, self._stall = stream, stall
        self._writing = asyncio.Lock()
        self._left = 0  # bytes of the incoming frame that were not read yet
        self._through, self._owed = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self._sent = self._confirmed = 0  # payloads

    async def send(self, payload: Readable, turns: asyncio.Semaphore, ready: asyncio.Event | None = None) -> None:
        """Send a payload once it is there and it is its turn; returns when the other side has it."""
        if ready is not None:
            await self._patiently(ready.wait())
        await self._patiently(turns.acquire())
        self._sent += 1
        try:
            await send_payload(self, payload, self._stall)
            await self._patiently(self._through.acquire())
        finally:
            turns.release()

    def received(self) -> None:
        """A payload of the other side is here, whole."""
        self._owed.release()

    async def acknowledge(self, payloads: int) -> None:
        """Tell the other side of each of its ``payloads``, and until then that we live.

        Not by who receives: two that both wait to write would not read.
        """
        for _ in range(payloads):
            await self._patiently(self._owed.acquire())
            await self._frame(GOT)

    async def settle(self, payloads: int) -> None:
        """Behind the last payload of the other side: wait until it has all of our ``payloads``."""
        while self._confirmed < payloads:
            if await self._next() == PART:
                raise BadMessage("more than its payloads")

    # -- as a stream, for peer/p2p/payload.py

    async def write(self, data: bytes, timeout: float) -> None:
        await self._frame(PART, data)

    async def read_into(self, out: memoryview, timeout: float) -> None:
        filled = 0
        while filled < len(out):
            while not self._left:
                await self._next()
            piece = out[filled : filled + self._left]
            await self._stream.read_into(piece, timeout)
            filled += len(piece)
            self._left -= len(piece)

    # -- frames

    async def _frame(self, kind: int, data: bytes = b"") -> None:
        async with self._writing:
            await self._stream.write(bytes([kind]) + len(data).to_bytes(HEAD - 1, "big"), self._stall)
            if data:
                await self._stream.write(data, self._stall)

    async def _next(self) -> int:
        """Read the head of a frame; of one with a payload's bytes these follow."""
        head = bytearray(HEAD)
        await self._stream.read_into(memoryview(head), self._stall)
        kind, self._left = head[0], int.from_bytes(head[1:], "big")
        if kind not in (PART, GOT, WAITS) or (self._left > 0) != (kind == PART) or self._left > CAP:
            raise BadMessage("not a frame of a payload")
        if kind == GOT:
            if self._confirmed == self._sent:
                raise BadMessage("it has what was not sent")
            self._confirmed += 1
            self._through.release()
        return kind

    async def _patiently(self, what: Coroutine[Any, Any, Any]) -> None:
        """Wait for something that takes the time it takes, with signs of life."""
        waited = asyncio.ensure_future(what)
        try:
            while not waited.done():
                await asyncio.wait([waited], timeout=self._stall / SIGNS)
                if not waited.done():
                    await self._frame(WAITS)
        finally:
            waited.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waited
