"""How many connections a direction has: few at first, twice as many as long as the total grows. Pure."""

from __future__ import annotations

FIRST_CONNECTIONS = 2  # connections
MOST_CONNECTIONS = 16
LOOK_PERIOD = 0.25  # seconds between two looks, at least
TRIPS_BETWEEN_LOOKS = 4  # round trips between two looks: TCP begins slowly
WORTH_IT = 1.1  # times the best rate so far: the last connections were worth it
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
        rate, self._before = (moved - self._before) / seconds, moved
        if rate > WORTH_IT * self._best:
            self._best, self._idle = rate, 0
            self.wanted = min(2 * self.wanted, MOST_CONNECTIONS)
        elif self.enough:
            return self.wanted
        else:
            self._idle += 1
        return self.wanted

    @property
    def enough(self) -> bool:
        """More were of no use."""
        return self._idle >= LOOKS_IN_VAIN
