"""How long one waits is how long the process ran meanwhile."""

from __future__ import annotations

import asyncio
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


def test_who_cancels_a_thread_waits_for_its_end() -> None:
    """The mean of a group was written to a buffer that this peer had taken for its own contribution meanwhile."""
    began, go, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        go.wait(30)
        ended.append(True)

    async def scene() -> None:
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

    asyncio.run(scene())
