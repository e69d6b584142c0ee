"""The stream to one member while a group averages: payloads both ways, each acknowledged, and keep-alives.

A payload is a vector, sent as parts with their digests (p2p/payload.py). It is acknowledged because buffers hold more
than a payload: only the other side knows that it has arrived. A member sends to few others at a time (:func:`turns`):
n - 1 flows at once overflow a home line's queue, a quarter of all packets is sent again, and all wait for the flow that
lost most.

Each direction is a sequence of frames: kind (1 byte), length (4 bytes), bytes. Where parts have connections of their
own (p2p/bulk), BEGUN takes the place of DATA.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from enum import IntEnum
from functools import partial

from peer import clock
from peer.p2p.bandwidth import PIECE, Bandwidth
from peer.p2p.deadline import together
from peer.p2p.payload import PartConnections, send_parts
from peer.p2p.stream import BadMessage, Stream

FRAME_HEAD = 5  # bytes
FRAME_CAP = 2 * 2**20  # bytes
SIGNS_OF_LIFE = 4  # keep-alives within the time after which a silent stream is given up
SENDERS = 3  # coroutines that may send keep-alives at a time
WHOLE_FRAME = 2**14  # bytes: without a limit of its bandwidth a member sends frames that are longer on average
LATE_STALLS = 2  # for which the other side may have sent frames before this side reads them
IN_FLIGHT = 2**20  # bytes sent before an acknowledgement: the content of a line of 100 Mbit/s and 80 ms


class FrameKind(IntEnum):
    """The first byte of a frame."""

    DATA = 1  # bytes of a payload
    ACKNOWLEDGED = 2  # a payload of the other side has arrived
    ALIVE = 3  # the sender lives
    BEGUN = 4  # the parts of the sender's next payload are on connections of their own; DATA is not used then


def turns(size: int) -> asyncio.Semaphore:
    """For all streams of a member: limits how many payloads of ``size`` bytes it sends at once."""
    return asyncio.Semaphore(max(2, IN_FLIGHT // max(size, 1)))


class FlowControlledStream:
    """One per member and round. ``stall``: seconds without a byte after which the member is given up; ``left``: bytes
    of payloads that are to come.

    Raises the errors of :class:`Stream`. Three coroutines use it at a time: one sends, one receives, one runs
    :meth:`acknowledge`. ``came``: payloads of the other side; ``coming``: a part of the next one has arrived;
    ``sending``: one of ours is on its way. ``direct``: connections for parts, as payload.py uses them.
    """

    def __init__(self, stream: Stream, stall: float, left: int = 0) -> None:
        self._stream, self._stall, self.left = stream, stall, left
        self._writing = asyncio.Lock()
        self._left = 0  # unread bytes of the incoming frame
        self._frames, self._began = 0.0, clock.monotonic()  # incoming frames, less those that their length permits
        self._sent = self._confirmed = 0  # our payloads
        self._begun = self.came = self._acknowledged = 0  # the other side's
        self._changed = asyncio.Event()  # one of these counts
        self.coming = self.sending = False
        self.direct = _Apart(self, stream.direct) if stream.direct is not None else None

    async def send(
        self, payload: AsyncIterator[bytes], turns: asyncio.Semaphore, ready: asyncio.Event | None = None
    ) -> None:
        """Send the parts of a payload once it is ``ready`` and has its turn; returns when the other side has it."""
        if ready is not None:
            await self._wait_for(ready.wait)
        await self._wait_for(turns.acquire)
        self._sent += 1
        try:
            self.sending = True
            await send_parts(self, payload, self._stall)
            await self._wait_for(partial(self._until, lambda: self._confirmed == self._sent))
            self.sending = False
        finally:
            turns.release()

    def received(self) -> None:
        """A payload of the other side has arrived completely."""
        self.came, self.coming = self.came + 1, False
        self._changed.set()

    async def acknowledge(self, payloads: int) -> None:
        """Acknowledge each of the other side's ``payloads``, and send keep-alives until then.

        The receiving coroutine cannot do this: two sides that both wait to write would not read. Where parts have
        connections of their own it reads no frames: they are read here.
        """
        await together([self._acknowledge(payloads), self._hear(payloads)])

    async def _acknowledge(self, payloads: int) -> None:
        while self._acknowledged < payloads:
            await self._wait_for(partial(self._until, lambda: self._acknowledged < self.came))
            await self._frame(FrameKind.ACKNOWLEDGED)
            self._acknowledged += 1

    async def _hear(self, payloads: int) -> None:
        """The other side's frames, until all its payloads have begun and it has all of ours."""
        while self.direct is not None and min(self._confirmed, self._begun) < payloads:
            await self._next()

    async def await_acknowledgements(self, payloads: int) -> None:
        """After the other side's last payload: wait until it has all of our ``payloads``."""
        while self.direct is None and self._confirmed < payloads:
            if await self._next() == FrameKind.DATA:
                raise BadMessage("bytes after its last payload")

    # -- as a stream, for peer/p2p/payload.py: pieces of a part are frames, so that others come between them

    @property
    def bandwidth(self) -> Bandwidth:
        return self._stream.bandwidth

    async def write(self, data: bytes, timeout: float) -> None:
        if data:
            await self._frame(FrameKind.DATA, data)  # a slow reader is heard meanwhile: keep-alives

    async def read_into(self, out: memoryview, timeout: float) -> None:
        filled = 0
        while filled < len(out):
            while not self._left:
                await self._next()
            piece = out[filled : filled + self._left]
            await self._stream.read_into(piece, timeout)
            filled += len(piece)
            self._left -= len(piece)
            self._arrived(len(piece))

    # -- frames

    async def _frame(self, kind: FrameKind, data: bytes = b"") -> None:
        async with self._writing:
            await self._stream.write(bytes([kind]) + len(data).to_bytes(FRAME_HEAD - 1, "big"), self._stall)
            if data:
                await self._stream.write(data, self._stall)

    async def _next(self) -> int:
        """Read the head of a frame; the bytes of a payload follow it."""
        head = bytearray(FRAME_HEAD)
        await self._stream.read_into(memoryview(head), self._stall)
        kind, self._left = head[0], int.from_bytes(head[1:], "big")
        known = (FrameKind.ACKNOWLEDGED, FrameKind.ALIVE, FrameKind.DATA if self.direct is None else FrameKind.BEGUN)
        if kind not in known or (self._left > 0) != (kind == FrameKind.DATA) or self._left > FRAME_CAP:
            raise BadMessage("not a frame of a payload")
        self._count_frame()
        if kind == FrameKind.ACKNOWLEDGED:
            if self._confirmed == self._sent:
                raise BadMessage("it acknowledges a payload that was not sent")
            self._confirmed += 1
            self._changed.set()
        if kind == FrameKind.BEGUN:
            if self._begun != self.came:
                raise BadMessage("it begins a payload before the last one has arrived")
            self._begun += 1
            self._changed.set()
        return kind

    def _count_frame(self) -> None:
        """A frame that has come already is read without a pause: a flood of short ones would hold the event loop.

        A member sends a keep-alive for each wait of its coroutines, and on a limited line pieces of parts at their
        turns (p2p/bandwidth.py), here twice as many.
        """
        self._frames += 1 - self._left / WHOLE_FRAME
        seconds = clock.monotonic() - self._began + LATE_STALLS * self._stall
        if self._frames > seconds * (SENDERS * SIGNS_OF_LIFE / self._stall + 2 / PIECE):
            raise BadMessage("more frames than a member sends")

    async def _until(self, met: Callable[[], bool]) -> None:
        """Wait until the counts are such that ``met()`` is true."""
        while not met():
            self._changed.clear()
            await self._changed.wait()

    async def _wait_for(self, event: Callable[[], Awaitable[object]]) -> None:
        """Wait for ``event`` however long it takes, and send keep-alives. It takes nothing when it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stall / SIGNS_OF_LIFE):
                    await event()
                return
            await self._frame(FrameKind.ALIVE)

    def _arrived(self, size: int) -> None:
        """So many bytes of the other side's next payload have come."""
        self.left, self.coming = self.left - size, True


class _Apart:
    """The connections for the parts of a stream's payloads. Its frames say when the parts of each are there."""

    def __init__(self, flow: FlowControlledStream, connections: PartConnections) -> None:
        self._flow, self._connections = flow, connections

    async def send(self, data: AsyncIterator[bytes], stall: float) -> None:
        await self._flow._frame(FrameKind.BEGUN)
        await self._connections.send(data, stall)

    async def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]:
        await self._flow._until(lambda: self._flow.came < self._flow._begun)
        async for number, room, digest in self._connections.receive(rooms, stall):
            self._flow._arrived(len(room))
            yield number, room, digest
