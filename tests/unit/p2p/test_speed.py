"""The speed test of two peers: it measures the line, and it is no weapon."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from peer.p2p import speed
from peer.p2p.budgets import SPEED_TESTS
from peer.p2p.event_loop import LoopThread
from peer.p2p.speed import SPEED_BYTES, SPEED_SECONDS, Direction, LineSpeed, SpeedTests, line_speed
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.backoff import Proven
from tests.unit.virtual import stream_pair

MBIT = 125_000


class Member:
    """One that serves tests, on lines of ``rate`` bytes a second; ``streams``: its ends."""

    def __init__(self, rate: float, latency: float = 0.02) -> None:
        self.tests, self._line = SpeedTests(Proven()), (latency, rate)
        self.streams: list[Stream] = []
        self.serving: list[asyncio.Future[None]] = []

    async def open(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        ours, theirs = await stream_pair(*self._line)
        theirs.remote = peer_id
        self.streams.append(theirs)
        self.serving.append(asyncio.ensure_future(self.tests.serve(theirs)))
        return ours

    async def test(self, direction: Direction, asker: str = "A") -> LineSpeed:
        return await line_speed(self.open, asker, (), direction)


@pytest.mark.parametrize("mbit", [1, 20])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_the_rate_is_that_of_the_line(thread: LoopThread, mbit: int, direction: Direction) -> None:
    found = thread.call(Member(mbit * MBIT).test(direction), 60)
    assert found.rate == pytest.approx(mbit * MBIT, rel=0.1)
    assert 0.04 <= found.trip < 0.06  # there and back


def test_one_test_runs_at_a_time_and_the_next_is_told_so(thread: LoopThread) -> None:
    member = Member(MBIT)

    async def two() -> list[LineSpeed | BaseException]:
        return await asyncio.gather(member.test("up"), member.test("down", "B"), return_exceptions=True)

    first, second = thread.call(two(), 60)
    assert isinstance(first, LineSpeed)
    assert isinstance(second, StreamLost) and "no further speed test" in str(second)
    assert isinstance(thread.call(member.test("down", "B"), 60), LineSpeed)


def test_an_id_has_few_tests_and_all_together_have_few(thread: LoopThread) -> None:
    member, each = Member(1e9), int(SPEED_TESTS.each * SPEED_TESTS.burst)

    async def many(askers: Sequence[str]) -> int:
        served = 0
        for asker in askers:
            try:
                await member.test("down", asker)
                served += 1
            except StreamLost:
                pass
        return served

    assert thread.call(many(["A"] * (each + 3)), 600) == each
    assert each < thread.call(many([f"B{it}" for it in range(3 * each)]), 600) + each <= 2 * each + 1


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_member_sends_and_reads_no_more_than_a_test(direction: Direction) -> None:
    """Of an asker that does not keep to it."""
    member = Member(1e9)
    stream = await member.open("A", speed.SPEED_PROTOCOL)
    await stream.send(speed.SpeedRequest(direction=direction), 1)
    await stream.receive(speed.SpeedReady, 1)
    try:
        for _ in range(64):  # MiB
            if direction == "up":
                await stream.write(bytes(2**20), 60)
            else:
                await stream.read_into(memoryview(bytearray(2**20)), 60)
    except (StreamLost, TimeoutError):
        pass
    await asyncio.gather(*member.serving, return_exceptions=True)
    moved = member.streams[0].received + member.streams[0].sent
    assert moved < 1.05 * SPEED_BYTES
    assert not member.tests._running.locked()


async def test_a_silent_asker_holds_the_place_for_seconds() -> None:
    member = Member(MBIT)
    stream = await member.open("A", speed.SPEED_PROTOCOL)
    await stream.send(speed.SpeedRequest(direction="up"), 1)
    await asyncio.sleep(3 * SPEED_SECONDS)
    await member.test("up", "B")
