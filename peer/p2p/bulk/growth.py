"""How many connections a direction has: few at first, twice as many as long as the total grows by it. Pure."""

from __future__ import annotations

FIRST_CONNECTIONS = 2
MOST_CONNECTIONS = 16
LOOK_PERIOD = 0.25  # seconds between two looks, at least
TRIPS_BETWEEN_LOOKS = 4  # round trips between two looks: TCP begins slowly
STEADY = 1.1  # times the rate of the look before: above it TCP still grows by itself
LOOKS_IN_VAIN = 2  # without growth, after which there are enough: a transfer may end within one
WORTH_IT = 1.3  # times the best rate so far: where each connection is bound, twice as many carry nearly twice as much


class Growth:
    """One transfer, both directions together: the one with more connections would take the line from the other, whose
    acknowledgements wait in its queue. ``useful``: the number with the best rate, once ``settled``.
    """

    def __init__(self, trip: float, useful: int | None = None) -> None:
        """``trip``: seconds of a round trip. ``useful``: of an earlier transfer; no more are tried."""
        self.wanted = self.useful = useful or FIRST_CONNECTIONS
        self.settled = useful is not None
        self.period = max(LOOK_PERIOD, TRIPS_BETWEEN_LOOKS * trip)
        self._moved = self._in_vain = 0
        self._rate = self._most = self._best = 0.0  # bytes a second: last, most with as many connections, with fewer

    def look(self, moved: int, seconds: float) -> int:
        """How many there should be. ``moved``: bytes so far; ``seconds`` since the last look."""
        before, self._moved = self._moved, moved
        if self.settled or not before or moved == before:  # no bytes, or the first ones: since when is not known
            return self.wanted
        last, self._rate = self._rate, (moved - before) / seconds
        self._most = max(self._most, self._rate)
        if not self._rate <= STEADY * last:
            return self.wanted
        if self._most < WORTH_IT * self._best:
            self._in_vain += 1
            self.settled = self._in_vain >= LOOKS_IN_VAIN
            return self.wanted
        self._best, self._most, self._in_vain, self.useful = self._most, 0.0, 0, self.wanted
        self.settled = self.wanted == MOST_CONNECTIONS
        self.wanted = min(2 * self.wanted, MOST_CONNECTIONS)
        return self.wanted
