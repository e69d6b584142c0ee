"""How many connections a direction has: few at first, twice as many as long as the total grows. Pure."""

from __future__ import annotations

import math

FIRST_CONNECTIONS = 1
MOST_CONNECTIONS = 16
LOOK_PERIOD = 0.25  # seconds between two looks, at least
TRIPS_BETWEEN_LOOKS = 4  # round trips between two looks: TCP begins slowly
WORTH_IT = 1.3  # times the best rate so far: where each connection is bound, twice as many carry nearly twice as much
LOOKS_IN_VAIN = 2  # looks without growth, after which there are enough


class Growth:
    """One direction of one transfer."""

    def __init__(self, trip: float, first: int = FIRST_CONNECTIONS) -> None:
        """``trip``: seconds of a round trip."""
        self.wanted = first
        self.period = max(LOOK_PERIOD, TRIPS_BETWEEN_LOOKS * trip)
        self._best = self._before = 0.0  # bytes a second; bytes
        self._idle = 0

    def look(self, moved: int, seconds: float) -> int:
        """How many there should be. ``moved``: bytes so far; ``seconds`` since the last look."""
        began, rate, self._before = self._before > 0, (moved - self._before) / seconds, moved
        if not began:  # the first bytes came at some time since the last look
            return self.wanted
        if rate > WORTH_IT * self._best:
            self._best, self._idle = rate, 0
            self.wanted = min(2 * self.wanted, MOST_CONNECTIONS)
        else:
            self._idle += 1
        if self._idle >= LOOKS_IN_VAIN:
            self._best = math.inf  # more were of no use
        return self.wanted
