"""A deadline that nobody has to guess: a few times the longest of the recent swaps."""

from __future__ import annotations

from collections import deque

DEADLINE_FACTOR = 4.0
DEADLINE_FLOOR = 5.0  # seconds: a hiccup of the machine is not a dead partner
DEADLINE_WINDOW = 8  # swaps
THREAD_GRACE = 5.0  # seconds on top of a deadline before the calling thread gives up on the network thread


class Deadline:
    """Seconds a swap may take. Before the first observation it is the ceiling."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._seen: deque[float] = deque(maxlen=DEADLINE_WINDOW)

    def observe(self, seconds: float) -> None:
        """A swap was completed in so many seconds."""
        self._seen.append(seconds)

    @property
    def seconds(self) -> float:
        if not self._seen:
            return self._ceiling
        return min(self._ceiling, max(DEADLINE_FLOOR, DEADLINE_FACTOR * max(self._seen)))
