"""How fast is the line to a member? It serves a short test, and no more than budgets.py allows.

    asker: SpeedRequest      member: SpeedReady | Refusal
    up:   the asker sends parts     the member reads for as long as the limits say, then SpeedResult
    down: the member sends parts    the asker reads for as long, then closes

Who reads measures: what was sent may still be in a buffer. The first second does not count, where there are more: TCP
begins slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Literal

from pydantic import Field

from peer import clock
from peer.p2p.budgets import SPEED_TESTS, Spending
from peer.p2p.deadline import running
from peer.p2p.payload import receive_parts, send_parts
from peer.p2p.stream import MESSAGE_TIMEOUT, Message, Open, Refusal, Stream, StreamLost
from peer.rounds.backoff import Proven
from peer.rounds.transfer_rule import IN_BUFFERS, LEAST_RATE

SPEED_PROTOCOL = "noloco/speed"
SPEED_SECONDS = 4.0  # of reading in a test
WARM_UP = 1.0  # seconds of these that do not count
SPEED_BYTES = 16 * 2**20  # that a test sends at most
SPEED_PART = 64 * 1024  # bytes
RESULT_TIMEOUT = MESSAGE_TIMEOUT + IN_BUFFERS / LEAST_RATE  # seconds for one behind parts
TURN_PATIENCE = 2.0  # seconds for the test before: its end may come late
Direction = Literal["up", "down"]  # seen by the asker
BUSY = Refusal(reason="it serves no further speed test now; try again in some minutes")


class SpeedRequest(Message):
    """May I send to you, or receive from you, for some seconds?"""

    kind: Literal["speed_request"] = "speed_request"
    direction: Direction


class SpeedReady(Message):
    """Yes, now."""

    kind: Literal["speed_ready"] = "speed_ready"


class SpeedResult(Message):
    """So many bytes came in so many seconds."""

    kind: Literal["speed_result"] = "speed_result"
    received: Annotated[int, Field(ge=0, le=2 * SPEED_BYTES)]
    seconds: Annotated[float, Field(ge=1e-3, le=2 * SPEED_SECONDS)]


@dataclass(frozen=True)
class LineSpeed:
    """``rate``: bytes a second in one direction; ``trip``: seconds of a round trip."""

    rate: float
    trip: float


class SpeedTests:
    """Serves :data:`SPEED_PROTOCOL`, one test at a time."""

    def __init__(self, proven: Proven) -> None:
        self._spent, self._running = Spending(SPEED_TESTS, proven), asyncio.Lock()

    async def serve(self, stream: Stream) -> None:
        """One stream."""
        asked = await stream.receive(SpeedRequest, MESSAGE_TIMEOUT)
        with contextlib.closing(stream):
            last = await self._test(stream, asked.direction)
            if last is not None:
                await stream.send_last(last, MESSAGE_TIMEOUT)
            else:
                await stream.until_closed(RESULT_TIMEOUT)

    async def _test(self, stream: Stream, direction: Direction) -> Refusal | SpeedResult | None:
        """The last message to the asker; ``None`` when it reads itself."""
        if not self._spent.spend(stream.remote):
            return BUSY
        try:
            async with asyncio.timeout(TURN_PATIENCE):
                await self._running.acquire()
        except TimeoutError:
            return BUSY
        try:
            await stream.send(SpeedReady(), MESSAGE_TIMEOUT)
            if direction == "up":
                return await _read(stream)
            with contextlib.suppress(StreamLost, TimeoutError):
                async with asyncio.timeout(SPEED_SECONDS + MESSAGE_TIMEOUT):
                    await send_parts(stream, _noise(), MESSAGE_TIMEOUT)
            return None
        finally:
            self._running.release()


async def line_speed(open: Open, peer_id: str, addresses: Sequence[str], direction: Direction) -> LineSpeed:
    """Test the line to a member. Raises :class:`StreamLost`, :class:`BadMessage` or ``TimeoutError``."""
    with contextlib.closing(await open(peer_id, SPEED_PROTOCOL, addresses)) as stream:
        began = clock.monotonic()
        await stream.send(SpeedRequest(direction=direction), MESSAGE_TIMEOUT)
        await stream.receive(SpeedReady, MESSAGE_TIMEOUT)
        trip = clock.monotonic() - began
        result = await (_read(stream) if direction == "down" else _sent(stream))
        return LineSpeed(result.received / result.seconds, trip)


async def _sent(stream: Stream) -> SpeedResult:
    """Send until the member says what it has got."""
    async with running(send_parts(stream, _noise(), RESULT_TIMEOUT)):
        return await stream.receive(SpeedResult, SPEED_SECONDS + RESULT_TIMEOUT)


async def _read(stream: Stream) -> SpeedResult:
    """Read for :data:`SPEED_SECONDS`, or :data:`SPEED_BYTES`."""
    came, began = stream.received, clock.monotonic()
    async with running(_discard(stream)) as (reading,):
        await asyncio.wait([reading], timeout=WARM_UP)
        if not reading.done():
            came, began = stream.received, clock.monotonic()
            await asyncio.wait([reading], timeout=SPEED_SECONDS - WARM_UP)
        seconds = max(1e-3, clock.monotonic() - began)
        if reading.done():
            reading.result()  # raises what has ended it early
        return SpeedResult(received=stream.received - came, seconds=seconds)


async def _discard(stream: Stream) -> None:
    room = memoryview(bytearray(SPEED_PART))
    async for _ in receive_parts(stream, repeat(room, SPEED_BYTES // SPEED_PART), MESSAGE_TIMEOUT):
        pass


async def _noise() -> AsyncIterator[bytes]:
    """Random bytes: a tunnel on the way may compress others."""
    part = os.urandom(SPEED_PART)
    for _ in range(SPEED_BYTES // SPEED_PART):
        yield part
