"""What the network thread may know of the training thread, and how a stop is asked for.

Written by the inner loop once a step (two float stores), read by the rendezvous.
"""

from __future__ import annotations

import math
import time

STEP_SMOOTHING = 0.2


class Progress:
    """When will this peer reach its next boundary (the end of its inner steps)?"""

    def __init__(self) -> None:
        self._remaining = 0
        self._steps = 0
        self._step_seconds: float | None = None
        self._last: float | None = None
        self._limit = self._until = math.inf
        self.phases = 0  # inner phases begun

    def begin(self, remaining: int, steps: int, limit: float = math.inf) -> None:
        """An inner phase starts or goes on with ``remaining`` steps to do; ``steps`` is H, a phase's usual length.

        It ends after ``limit`` seconds in any case.
        """
        self._steps, self._remaining = steps, remaining
        self._last = time.monotonic()
        self._limit, self._until = limit, self._last + limit
        self.phases += 1

    def tick(self) -> None:
        """One inner step is done."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            seen = self._step_seconds
            self._step_seconds = took if seen is None else seen + STEP_SMOOTHING * (took - seen)
        self._last = now
        self._remaining -= 1

    @property
    def step_seconds(self) -> float:
        """Expected seconds of an inner step; 0 before the first one."""
        return self._step_seconds or 0.0

    @property
    def phase_seconds(self) -> float | None:
        """Expected seconds of an inner phase; ``None`` before the first step."""
        return None if self._step_seconds is None else min(self._step_seconds * max(self._steps, 1), self._limit)

    def rate(self, per_step: float) -> float:
        """``per_step`` things a step as things a second; 0 before the first step."""
        return per_step / self._step_seconds if self._step_seconds else 0.0

    def eta(self) -> float | None:
        """Seconds until the next boundary; ``None`` before the first step was timed."""
        if self._step_seconds is None or self._last is None:
            return None
        now = time.monotonic()
        return max(0.0, min(self._step_seconds * self._remaining - (now - self._last), self._until - now))
