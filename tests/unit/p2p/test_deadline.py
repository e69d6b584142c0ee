"""A transfer may take as long as it will be done in time, at the rate that was seen since the last look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest

from peer import clock
from peer.p2p.deadline import TooSlow, in_time, running
from peer.p2p.event_loop import LoopThread
from peer.rounds.transfer_rule import CHECKS, LEAST_RATE, UNSEEN_PHASE_SECONDS, state_limit, swap_limit
from tests.simulated.loop import PROCESS, Process
from tests.simulated.runtime import Runtime
from tests.unit.virtual import took, within

SIZE, LIMIT = 1_000_000, 100.0  # bytes, seconds
Rate = Callable[[float], float]  # bytes a second, by the seconds since the start


def transfer(thread: LoopThread, rate: Rate, *, tail: float = 0.0) -> float:
    """Seconds of a transfer and of ``tail`` after its last byte. Raises :class:`TooSlow`."""
    left, began = float(SIZE), clock.monotonic()

    async def work() -> None:
        nonlocal left
        await asyncio.sleep(0.25)
        while left > 0:
            left -= rate(clock.monotonic() - began) / 2
            await asyncio.sleep(0.5)
        await asyncio.sleep(tail)

    thread.call(in_time(work(), lambda: {"receiving": max(0, int(left))}, LIMIT), 10 * LIMIT)
    return clock.monotonic() - began


def ends(thread: LoopThread, rate: Rate, *, tail: float = 0.0) -> tuple[float, str]:
    """When a transfer is ended, and what is said."""
    began = clock.monotonic()
    with pytest.raises(TooSlow) as found:
        transfer(thread, rate, tail=tail)
    return clock.monotonic() - began, str(found.value)


def test_what_will_be_done_in_time_goes_on_to_its_end(thread: LoopThread) -> None:
    assert transfer(thread, lambda _: SIZE / 99) == took(99.0, more=1.0)
    assert transfer(thread, lambda now: 0.0 if now > 80 and now < 85 else SIZE / 90) == took(95.0, more=1.0)


def test_what_will_not_be_done_ends_at_the_first_look_with_its_rate(thread: LoopThread) -> None:
    seconds, said = ends(thread, lambda _: 2500.0)
    assert seconds == took(LIMIT / CHECKS)
    assert said == (
        "too slow: receiving at 0.02 Mbit/s with 0.938 MB left, it would have taken 400 s (100 s are allowed)"
    )


def test_a_line_that_drops_is_noticed_at_the_second_look_after_it(thread: LoopThread) -> None:
    seconds, said = ends(thread, lambda now: SIZE / 60 if now < 45 else 10.0)
    assert seconds == took(3 * LIMIT / CHECKS)  # from 25 to 50 s it was slower, and still fast enough
    assert "at 8e-05 Mbit/s" in said


def test_silence_is_named(thread: LoopThread) -> None:
    assert "0 Mbit/s with 1 MB left, it would never have ended" in ends(thread, lambda _: 0.0)[1]


def test_after_the_last_byte_only_the_limit_counts(thread: LoopThread) -> None:
    seconds, said = ends(thread, lambda _: SIZE / 10, tail=1e6)
    assert (seconds, said) == (took(LIMIT), "not done within 100 s")


def test_what_waits_for_another_transfer_is_not_judged_by_that_time(thread: LoopThread) -> None:
    """In a group, a member sends the next payload when others have sent theirs: it is fast once it does."""
    began = clock.monotonic()

    def left() -> dict[str, int]:
        now = clock.monotonic() - began
        if now < 0.9 * LIMIT / CHECKS:
            return {"payload 1": SIZE - 10}
        return {"payload 2": int(SIZE * (60 - now) / 40)}

    thread.call(in_time(asyncio.sleep(60), left, LIMIT), 10 * LIMIT)


def test_the_time_of_a_frozen_process_does_not_count(virtual: Runtime, thread: LoopThread) -> None:
    """The partner went on meanwhile; what it sent is there when this process is."""
    process = PROCESS.get()
    assert isinstance(process, Process)
    other, done = Process("outside"), 0.0
    with within(other):
        virtual.loop.call_later(10.0, process.freeze)
        virtual.loop.call_later(410.0, process.thaw, virtual.loop)

    async def work() -> None:
        nonlocal done
        for _ in range(80):
            await asyncio.sleep(1.0)
            done += SIZE / 80

    began = clock.monotonic()
    asyncio.run_coroutine_threadsafe(in_time(work(), lambda: {"receiving": int(SIZE - done)}, LIMIT), thread.loop)
    clock.sleep(600.0)
    assert done == pytest.approx(SIZE)
    assert clock.monotonic() - began >= 479


def test_a_failure_of_the_work_is_its_own_and_cancelling_ends_the_work(thread: LoopThread) -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise OSError("broken")

    async def lasts() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("work")

    with pytest.raises(OSError, match="broken"):
        thread.call(in_time(fails(), dict, LIMIT), 1.0)

    async def cancelled() -> None:
        task = asyncio.ensure_future(in_time(lasts(), dict, LIMIT))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    thread.call(cancelled(), 5.0)
    assert ended == ["work"]


def test_limits_follow_phases_and_sizes_and_have_a_floor() -> None:
    assert swap_limit(10.0, 4.0, 0.05) == swap_limit(10.0, 4.0, 10.0) == 40.0  # each look is after a stall at least
    assert swap_limit(10.0, 4.0, 900.0) == 3600.0
    assert swap_limit(10.0, 4.0, 0.0) == 4 * UNSEEN_PHASE_SECONDS
    assert state_limit(1000, 80.0) == 80.0
    sizes = [state_limit(size, 80.0) * LEAST_RATE for size in (10**8, 10**10, 10**12)]
    assert all(one < other for one, other in pairwise(sizes)) and sizes[-1] == pytest.approx(10**12)


@pytest.mark.parametrize("fails", [False, True])
def test_what_runs_beside_a_block_has_ended_after_it(thread: LoopThread, fails: bool) -> None:
    ended: list[float] = []

    async def work(seconds: float) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(seconds)  # closes what it holds
            ended.append(seconds)

    async def block() -> None:
        async with running(work(2.0), work(1.0)):
            await asyncio.sleep(1.0)
            if fails:
                raise OSError

    began = clock.monotonic()
    with pytest.raises(OSError) if fails else nullcontext():
        thread.call(block(), 10.0)
    assert ended == [1.0, 2.0]
    assert clock.monotonic() - began == took(3.0)
