"""The stream to one member while a group averages: payloads both ways, each acknowledged, and signs of life meanwhile.

A payload is a vector, sent as parts with their digests (p2p/payload.py). Why acknowledged: what was written lies in
buffers that hold more than a payload, so only the other side knows that it has arrived. A member sends to few others
at a time (:func:`turns`): n - 1 flows at once overflow a home line's queue, a quarter of all packets is sent again, and
everybody waits for the flow that lost most.

Each direction is a row of frames: what it is (1 byte), length (4 bytes), bytes. Next stations: all_reduce.py,
all_gather.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from peer.p2p.payload import fp32_parts, send_parts
from peer.p2p.stream import BadMessage, Stream
from peer.rounds.contribution import Readable

DATA, ACKNOWLEDGED, ALIVE = 1, 2, 3  # bytes of a payload; a payload has arrived; nothing to send yet
FRAME_HEAD = 5  # bytes
FRAME_CAP = 2 * 2**20  # bytes
SIGNS_OF_LIFE = 4  # within the time after which a silent stream is given up
IN_FLIGHT = 2**20  # bytes that are sent before any of them is acknowledged: what a line of 100 Mbit/s and 80 ms holds


def turns(size: int) -> asyncio.Semaphore:
    """For all streams of a member: how many payloads of ``size`` bytes it sends at once, and in which order."""
    return asyncio.Semaphore(max(2, IN_FLIGHT // max(size, 1)))


class FlowControlledStream:
    """One per member and round. ``stall``: seconds without a byte after which the member is given up.

    Raises what :class:`Stream` does. Three coroutines run at the same time: one sends, one receives, and
    :meth:`acknowledge`.
    """

    def __init__(self, stream: Stream, stall: float) -> None:
        self._stream, self._stall = stream, stall
        self._writing = asyncio.Lock()
        self._left = 0  # bytes of the incoming frame that were not read yet
        self._arrived, self._owed = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self._sent = self._confirmed = 0  # payloads

    async def send(self, payload: Readable, turns: asyncio.Semaphore, ready: asyncio.Event | None = None) -> None:
        """Send a payload once it is there and it is its turn; returns when the other side has it."""
        if ready is not None:
            await self._wait_for(ready.wait())
        await self._wait_for(turns.acquire())
        self._sent += 1
        try:
            await send_parts(self, fp32_parts(payload), self._stall)
            await self._wait_for(self._arrived.acquire())
        finally:
            turns.release()

    def received(self) -> None:
        """A payload of the other side has arrived, whole."""
        self._owed.release()

    async def acknowledge(self, payloads: int) -> None:
        """Tell the other side of each of its ``payloads``, and until then that we live.

        The coroutine that receives cannot do this: two that both wait to write would not read.
        """
        for _ in range(payloads):
            await self._wait_for(self._owed.acquire())
            await self._frame(ACKNOWLEDGED)

    async def settle(self, payloads: int) -> None:
        """After the last payload of the other side: wait until it has all of our ``payloads``."""
        while self._confirmed < payloads:
            if await self._next() == DATA:
                raise BadMessage("more than its payloads")

    # -- as a stream, for peer/p2p/payload.py

    async def write(self, data: bytes, timeout: float) -> None:
        if data:
            await self._frame(DATA, data)

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
            await self._stream.write(bytes([kind]) + len(data).to_bytes(FRAME_HEAD - 1, "big"), self._stall)
            if data:
                await self._stream.write(data, self._stall)

    async def _next(self) -> int:
        """Read the head of a frame; of one with a payload's bytes these follow."""
        head = bytearray(FRAME_HEAD)
        await self._stream.read_into(memoryview(head), self._stall)
        kind, self._left = head[0], int.from_bytes(head[1:], "big")
        if kind not in (DATA, ACKNOWLEDGED, ALIVE) or (self._left > 0) != (kind == DATA) or self._left > FRAME_CAP:
            raise BadMessage("not a frame of a payload")
        if kind == ACKNOWLEDGED:
            if self._confirmed == self._sent:
                raise BadMessage("it has what was not sent")
            self._confirmed += 1
            self._arrived.release()
        return kind

    async def _wait_for(self, event: Coroutine[Any, Any, Any]) -> None:
        """Wait for ``event`` however long it takes, and send signs of life meanwhile."""
        waited = asyncio.ensure_future(event)
        try:
            while not waited.done():
                await asyncio.wait([waited], timeout=self._stall / SIGNS_OF_LIFE)
                if not waited.done():
                    await self._frame(ALIVE)
        finally:
            waited.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waited
