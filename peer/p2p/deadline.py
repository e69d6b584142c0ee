"""How long coroutines run: transfers as long as they are worth it, and several together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from peer import clock
from peer.rounds.transfer_rule import CHECKS

T = TypeVar("T")
LEAVING_SECONDS = 10.0  # for what still runs after a request to stop or to pause
THREAD_GRACE = 5.0  # seconds on top of a deadline before the calling thread gives up on the network thread
MBIT = 125_000  # bytes


class TooSlow(TimeoutError):
    """A transfer would not be done in time at the rate that was seen."""


class Leaving(TimeoutError):
    """This peer was asked to stop or to pause, and waits for others no longer."""


@asynccontextmanager
async def running(*works: Awaitable[T]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """All at once, each as a task. What still runs at the end of the block is cancelled, and has ended after it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_time(
    work: Coroutine[Any, Any, T],
    left: Callable[[], Mapping[str, int]],
    limit: float,
    window: float | None = None,
) -> T:
    """The result of ``work``, which transfers bytes and may take ``limit`` seconds. Raises :class:`TooSlow`.

    ``left``: the bytes that are left of each transfer that is not waiting for another one, by what it is. Every
    ``window`` seconds (a quarter of ``limit``) each that was there at the last look must need no longer than what
    remains, at its rate since then. Time in which this process was frozen does not count. ``work`` itself notices
    silence.
    """
    window, passed, before = window or limit / CHECKS, 0.0, left()
    async with running(work) as (task,):
        while passed < limit - 1e-6:  # less is what rounding leaves
            patience = min(window, limit - passed)
            for seconds in clock.slices(patience):
                if (await asyncio.wait([task], timeout=seconds))[0]:
                    return task.result()
            passed, now = passed + patience, left()
            for what, rest in now.items():
                rate = (before.get(what, math.inf) - rest) / patience
                if rest > rate * (limit - passed):
                    raise TooSlow(_reason(what, rate, rest, passed, limit))
            before = now
        raise TooSlow(f"not done within {limit:.3g} s")


async def unless_away(
    work: Coroutine[Any, Any, T],
    away: Callable[[], bool],
    patience: float = LEAVING_SECONDS,
    period: float = clock.SLICE,
) -> T:
    """The result of ``work``. Raises :class:`Leaving` when this peer has been ``away`` for ``patience`` seconds."""
    seconds = 0.0
    async with running(work) as (task,):
        while not (await asyncio.wait([task], timeout=period))[0]:
            if away() and (seconds := seconds + period) >= patience:
                raise Leaving("asked to stop")
        return task.result()


def _reason(what: str, rate: float, left: int, passed: float, limit: float) -> str:
    """One sentence; ``rate`` in bytes a second."""
    seconds = passed + left / rate if rate else math.inf
    took = f"it would have taken {seconds:.3g} s" if rate else "it would never have ended"
    rest = f"{left / 1e6:.3g} MB" if left >= 1e5 else f"{left} bytes"
    return f"too slow: {what} at {rate / MBIT:.3g} Mbit/s with {rest} left, {took} ({limit:.3g} s are allowed)"


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all at once; the first failure cancels the others, and nothing is left running."""
    async with running(*works) as tasks:
        return list(await asyncio.gather(*tasks))
