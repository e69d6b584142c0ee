"""What a holder's pings may take of its relay."""

from __future__ import annotations

import asyncio

from peer import clock
from peer.p2p.reachability.relay import PONG_TIMEOUT, Granted, Ping, Relay, Reserve
from peer.p2p.stream import Stream
from peer.rounds.backoff import Proven
from tests.unit.virtual import stream_pair


async def no_target(*_: object) -> Stream:
    raise AssertionError


async def test_a_flood_of_pings_is_read_one_a_second() -> None:
    """A relay that answered each at once did nothing else as long as more came."""
    answered = 0

    async def listen(holder: Stream) -> None:
        nonlocal answered
        while True:
            await holder.receive(Ping, 60)
            answered += 1

    holder, theirs = await stream_pair()
    serving = asyncio.ensure_future(Relay(no_target, Proven()).hold(theirs))
    await holder.send(Reserve(), 5)
    await holder.receive(Granted, 5)
    for number in range(1000):
        await holder.send(Ping(number=number), 5)
    listening = asyncio.ensure_future(listen(holder))
    await asyncio.sleep(10.5)
    for task in (listening, serving):
        task.cancel()
    await asyncio.gather(listening, serving, return_exceptions=True)
    assert answered == 11


async def test_a_ping_a_second_after_the_last_one_is_answered_at_once() -> None:
    holder, theirs = await stream_pair()
    serving = asyncio.ensure_future(Relay(no_target, Proven()).hold(theirs))
    await holder.send(Reserve(), 5)
    await holder.receive(Granted, 5)
    took = 0.0
    for number in range(3):
        began = clock.monotonic()
        await holder.send(Ping(number=number), 5)
        await holder.receive(Ping, PONG_TIMEOUT)
        took = max(took, clock.monotonic() - began)
        await asyncio.sleep(1.1)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert took < 0.1
