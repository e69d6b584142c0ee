"""The limits on what a peer sends and receives: they hold, and a limited line never looks like a dead one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import torch

from peer import clock
from peer.config.schema import ExchangeConfig
from peer.p2p.bandwidth import BURST, Bandwidth
from peer.p2p.event_loop import LoopThread
from peer.p2p.payload import receive_parts, send_parts
from peer.p2p.stream import Message, Stream
from peer.rounds.contribution import Averaged, Vector
from peer.rounds.types import Group, Link, Outcome
from tests.unit.exchange.group.harness import many
from tests.unit.exchange.pair_harness import at_once, pair_exchange
from tests.unit.virtual import stream_pair

MIB = 2**20
MBIT = 125_000  # bytes
STALL = 4.0  # seconds; a part of 1 MiB takes twice as long at 1 Mbit/s


class Word(Message):
    """A small message."""


def limited(stream: Stream, up: str | None = None, down: str | None = None) -> Stream:
    stream.bandwidth = Bandwidth.of(up, down)
    return stream


async def part(size: int) -> AsyncIterator[bytes]:
    yield bytes(size)


async def transfer(sender: Stream, receiver: Stream, size: int) -> float:
    """Seconds until one part has arrived."""

    async def receive() -> None:
        async for _ in receive_parts(receiver, [memoryview(bytearray(size))], STALL):
            pass

    began = clock.monotonic()
    await asyncio.gather(send_parts(sender, part(size), STALL), receive())
    return clock.monotonic() - began


@pytest.mark.parametrize(("up", "down"), [("8mbit", None), (None, "8mbit"), ("8mbit", "20mbit")])
@pytest.mark.parametrize("seconds", [2, 5, 20])
async def test_the_mean_rate_is_the_limit(up: str | None, down: str | None, seconds: int) -> None:
    sender, receiver = await stream_pair()
    found = await transfer(limited(sender, up=up), limited(receiver, down=down), seconds * 8 * MBIT)
    assert found == pytest.approx(seconds, rel=0.05 + 0.01)


@pytest.mark.real_time
@pytest.mark.parametrize("limits", [{"up": "16mbit"}, {"down": "16mbit"}], ids=str)
async def test_real_streams_are_not_faster_than_the_limit(limits: dict[str, str]) -> None:
    size = 4 * MBIT
    sender, receiver = await stream_pair()
    limited(sender if "up" in limits else receiver, **limits)
    assert await transfer(sender, receiver, size) >= size / (16 * MBIT) - BURST


async def test_all_streams_of_a_peer_share_the_limit_and_none_starves() -> None:
    pairs = [await stream_pair() for _ in range(4)]
    shared = Bandwidth.of("8mbit", None)
    for sender, _ in pairs:
        sender.bandwidth = shared
    times = await asyncio.gather(*(transfer(*pair, 8 * MBIT) for pair in pairs))
    assert max(times) == pytest.approx(4.0, rel=0.05) and min(times) > 3.5


async def test_a_message_does_not_wait_for_parts() -> None:
    sender, receiver = await stream_pair()
    one, two = await stream_pair()
    one.bandwidth = two.bandwidth = limited(sender, "1mbit", "1mbit").bandwidth
    bulk = asyncio.ensure_future(transfer(sender, receiver, MIB))
    await asyncio.sleep(1.0)
    began = clock.monotonic()
    await one.send(Word(), 1.0)
    await two.receive(Word, 1.0)
    seconds = clock.monotonic() - began
    bulk.cancel()
    assert seconds < 0.01


NUMEL = MIB // 2  # two parts


def swap(thread: LoopThread, limits: dict[str, str], phase_seconds: float) -> list[Averaged]:
    """Of two peers of which one is limited."""
    streams = thread.call(stream_pair(), 5)
    limited(streams[0], **limits)
    settings = ExchangeConfig(stall=STALL)
    sides = [pair_exchange(thread, NUMEL, settings=settings) for _ in streams]
    vectors = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) for _ in streams]
    groups = [Group(0, (Link("B", "b", stream),), phase_seconds=phase_seconds) for stream in streams]
    works = zip(sides, vectors, groups, strict=True)
    return at_once([partial(side.average, Vector(it), group) for side, it, group in works], seconds=1e4)


LIMITS = pytest.mark.parametrize("limits", [{"up": "1mbit"}, {"down": "1mbit"}], ids=str)


@LIMITS
def test_a_swap_of_a_limited_peer_merges_though_a_part_takes_longer_than_a_stall(
    thread: LoopThread, limits: dict[str, str]
) -> None:
    one, two = swap(thread, limits, phase_seconds=60.0)
    assert (one.outcome, two.outcome) == (Outcome.MERGED, Outcome.MERGED), (one.detail, two.detail)
    assert one.seconds == pytest.approx(8 * NUMEL * 4 / 1e6, rel=0.05)


@LIMITS
def test_a_swap_that_takes_too_long_at_the_limit_is_slow_and_not_dead(
    thread: LoopThread, limits: dict[str, str]
) -> None:
    ends = swap(thread, limits, phase_seconds=3.0)
    assert [it.outcome for it in ends] == 2 * [Outcome.TIMEOUT]
    said = [it.detail for it in ends]  # who looks first leaves, and the other one sees that
    assert any("too slow" in it for it in said) and not any("no answer" in it for it in said), said


@pytest.mark.parametrize("limits", [("1mbit", None), (None, "1mbit")], ids=str)
def test_a_group_with_a_limited_member_merges_though_a_slice_takes_longer_than_a_stall(
    limits: tuple[str | None, str | None],
) -> None:
    """The other two send to it at once: each sees that it reads only now and then, and hears it meanwhile."""
    settings = ExchangeConfig(stall=STALL)
    vectors = [torch.full((3 * NUMEL,), 1.0 + place) for place in range(3)]
    with many(3, 3 * NUMEL, settings=settings, phase_seconds=60.0) as group:
        group.members[1].bandwidth = Bandwidth.of(*limits)
        results = group.average([Vector(it) for it in vectors])
    assert [it.outcome for it in results] == 3 * [Outcome.MERGED], results
