"""How long one waits is how long the process ran meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import clock
from peer.clock import FREEZE, SLICE, slices


def quarters(most: int) -> st.SearchStrategy[float]:
    """Of seconds: a clock that is set by hand must not stand still by rounding."""
    return st.integers(1, 4 * most).map(lambda number: number / 4)


@given(quarters(20), st.lists(quarters(2000), max_size=5))
def test_only_a_freeze_makes_it_longer(seconds: float, freezes: list[float]) -> None:
    """Each freeze falls into one slice."""
    with pytest.MonkeyPatch.context() as patch:
        now, waited = 0.0, 0.0
        patch.setattr(clock, "monotonic", lambda: now)
        for number, slice in enumerate(slices(seconds)):
            assert 0 < slice <= SLICE
            waited += slice
            now += slice + (freezes[number] if number < len(freezes) else 0.0)
    lost = sum(min(it, FREEZE) for it in freezes)  # what a busy machine may take as well
    assert seconds - lost <= waited <= seconds


@pytest.mark.real_time
async def test_who_cancels_a_thread_waits_for_its_end() -> None:
    """The mean of a group was written to a buffer that this peer had taken for its own contribution meanwhile."""
    began, go, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        go.wait(30)
        ended.append(True)

    task = asyncio.ensure_future(clock.in_thread(work))
    await asyncio.to_thread(began.wait, 30)
    for _ in range(2):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


def test_a_worker_does_one_thing_after_the_other_until_it_is_shut_down() -> None:
    go, done = threading.Event(), list[int]()
    with clock.worker("one") as worker:
        first = worker.submit(go.wait, 30)
        others = [worker.submit(done.append, number) for number in range(3)]
        failed = worker.submit(lambda: 1 / 0)
        go.set()
    assert first.result(0) and done == [0, 1, 2] and all(it.done() for it in others)
    with pytest.raises(ZeroDivisionError):
        failed.result(0)


def test_a_worker_forgets_what_it_has_not_begun() -> None:
    began, go = threading.Event(), threading.Event()
    worker = clock.worker("one")
    running = worker.submit(lambda: began.set() or go.wait(30))
    assert began.wait(30)
    waiting = worker.submit(print)
    worker.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert running.result(30) and waiting.cancelled()


def test_a_process_ends_whatever_its_workers_do() -> None:
    """A program that ended without OuterLoop.close() held its GPU until its partner had come, for up to two phases."""
    program = "import threading; from peer import clock; clock.worker('one').submit(threading.Event().wait)"
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True)
