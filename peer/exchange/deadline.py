"""How an exchange ends: its deadline comes from recent swaps, and its coroutines end together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

DEADLINE_FACTOR = 4.0
DEADLINE_FLOOR = 5.0  # seconds: a short pause of the machine is not a dead partner
DEADLINE_WINDOW = 8  # swaps
THREAD_GRACE = 5.0  # seconds on top of a deadline before the calling thread gives up on the network thread


class Deadline:
    """Seconds a swap may take: a few times the longest of the recent swaps, ``ceiling`` before the first one."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._seen: deque[float] = deque(maxlen=DEADLINE_WINDOW)

    def observe(self, seconds: float) -> None:
        """A swap was completed."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float:
        if not self._seen:
            return self._ceiling
        return min(self._ceiling, max(DEADLINE_FLOOR, DEADLINE_FACTOR * max(self._seen)))


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all at once; the first failure cancels the others, and nothing is left running."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
