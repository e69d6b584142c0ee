"""Two sides of direct connections over loopback: real sockets, TLS and threads, and a stream to agree on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pytest

from peer.p2p.bulk import listener, offer
from peer.p2p.bulk.offer import BulkOffer, BulkPort
from peer.p2p.payload import receive_parts
from peer.p2p.stream import Stream
from peer.rounds.backoff import Proven
from tests.unit.virtual import stream_pair

HOST = "127.0.0.1"
PART = 100_000  # bytes
STALL = 5.0
WAIT = 60.0  # seconds: both sides are one process, on a machine that may be busy
LIMITS = ((offer, "DIAL_SECONDS"), (offer, "READY_TIMEOUT"), (listener, "ADMIT_SECONDS"))
PRODUCTS = [getattr(module, name) for module, name in LIMITS]


def patient(patch: pytest.MonkeyPatch) -> None:
    """A direct connection may take :data:`WAIT` seconds to come about, unless the test has set its own limit. All
    members are one process: forty at once took a quarter of what a listener waits for one, on a machine with a load of
    8, and whoever is not let in sends over the p2p stream.
    """
    for (module, name), limit in zip(LIMITS, PRODUCTS, strict=True):
        if getattr(module, name) == limit:
            patch.setattr(module, name, WAIT)


@dataclass
class Side:
    """One member: its port, and its end of the stream."""

    port: BulkPort
    stream: Stream


class Sides:
    """``caller`` has opened the stream. Each has tasks that end with it."""

    def __init__(self, caller: Side, called: Side) -> None:
        self.caller, self.called = caller, called

    def offers(self, size: int = 2**30) -> tuple[BulkOffer | None, BulkOffer | None]:
        return tuple(it.port.offer(it.stream, size) for it in (self.caller, self.called))  # type: ignore[return-value]

    async def agree(self) -> None:
        """Both make their offers and agree."""
        one, two = self.offers()
        await asyncio.gather(
            self.caller.port.agree(self.caller.stream, one, two), self.called.port.agree(self.called.stream, two, one)
        )


@contextlib.asynccontextmanager
async def sides(*, caller_listens: bool = True, called_listens: bool = True) -> AsyncIterator[Sides]:
    """Made with patience (:func:`patient`)."""
    with pytest.MonkeyPatch.context() as patch:
        patient(patch)
        async with _connected(caller_listens, called_listens) as two:
            yield two


@contextlib.asynccontextmanager
async def _connected(caller_listens: bool, called_listens: bool) -> AsyncIterator[Sides]:
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.ensure_future(work))

    made = []
    for stream, listens in zip(await stream_pair(), (caller_listens, called_listens), strict=True):
        port = BulkPort(Proven(), spawn)
        port.start(HOST, 0, "auto", listens=listens)
        stream.bulk_port, stream.origin = port, f"/ip4/{HOST}/tcp/4000"
        stream.remote = str(len(made))
        made.append(Side(port, stream))
    try:
        yield Sides(*made)
    finally:
        for side in made:
            side.stream.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def part(number: int, size: int = PART) -> bytes:
    """What part ``number`` is."""
    return bytes([number % 251]) * size


async def parts(count: int, size: int = PART) -> AsyncIterator[bytes]:
    for number in range(count):
        yield part(number, size)


async def receive(stream: Stream, count: int, size: int = PART) -> list[bytes]:
    found, room = [], memoryview(bytearray(size))
    async for number, _, _ in receive_parts(stream, repeat(room, count), STALL):
        assert number == len(found)
        found.append(bytes(room))
    return found
