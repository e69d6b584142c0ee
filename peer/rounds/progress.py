"""The inner phase: how long it is, when it ends, and how much later others still wait for it.

``phase_steps`` is its length in steps, ``phase_seconds`` its length in time, ``phase_number`` its number. The inner
loop writes :class:`Progress` once a step (two float stores); matchmaking reads it.
"""

from __future__ import annotations

import math

from peer import clock
from peer.rounds.types import Grouping

STEP_SMOOTHING = 0.2  # weight of the newest inner step in the time of one
LONGEST_STEP = 10.0  # times the expected time counts for one step: a frozen process says nothing of the next ones
SHORTEST = 8  # parts of H
LATE_SLACK = 2.0  # seconds that a peer may be late, in addition to half of the time that it announced


def phase_steps(inner_steps: int, left: float, grouping: Grouping, swap: float = 0) -> int:
    """Steps of the phase that begins with ``left`` steps of the run to do (a whole number or infinity).

    H, but shorter and shorter at the end of a run for methods that average in pairs: a high learning rate keeps the
    replicas apart, and at its end a few more swaps bring every peer's model close to the average of all. The last H
    steps are halved until a phase would be shorter than H / 8: two or three swaps more. Nor is it shorter than a
    ``swap`` that runs during ``swap`` inner steps: the next boundary would wait for it.
    """
    if left > inner_steps or grouping is not Grouping.PAIR:
        return int(min(inner_steps, left))
    half = math.ceil(left / 2)
    return half if half >= max(inner_steps / SHORTEST, swap) else int(left)


def may_be_late(announced: float) -> float:
    """Seconds after the end of the ``announced`` ones for which a peer is still waited for, in pairs and in groups."""
    return announced / 2 + LATE_SLACK


class Progress:
    """When this peer reaches its next boundary, after its inner steps."""

    def __init__(self) -> None:
        self._remaining = 0
        self._steps = self._following = 0
        self.step_seconds = 0.0  # expected for an inner step; 0 before the first one
        self._last: float | None = None
        self._limit = self._until = math.inf
        self._swap_until = 0.0
        self.swap_seconds = 0.0  # of the last swap that has succeeded; 0 before the first one
        self.judge_seconds = 0.0  # the longest time in which a merge was judged
        self.prepare_seconds = 0.0  # of the last contribution: its peer is at its boundary so long after its last step
        self.phase_number = 0  # of the current inner phase, from 1; 0 before the first one

    def begin(self, remaining: int, steps: int, limit: float = math.inf, following: int | None = None) -> None:
        """An inner phase starts or goes on with ``remaining`` steps to do.

        ``steps``: H, the usual length of a phase; ``limit``: seconds after which such a phase ends, and a part of one
        sooner. ``following``: the steps of the next one if they are others; 0 if none follows.
        """
        self._steps, self._remaining = steps, remaining
        self._following = steps if following is None else following
        self._last = clock.monotonic()
        self._limit, self._until = limit, self._last + (limit * remaining / steps if limit < math.inf else limit)
        self.phase_number += 1

    @property
    def swap_steps(self) -> float:
        """Inner steps in the time of the last swap; 0 when unknown."""
        return self.swap_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def swapping(self) -> bool:
        return self._swap_until > 0

    def swap_begins(self) -> None:
        """It will take as long as the last one; when it ends is not known if there was none."""
        self._swap_until = clock.monotonic() + (self.swap_seconds or math.inf)

    def swap_took(self, seconds: float) -> None:
        """The swap has ended; 0: it has failed."""
        self._swap_until, self.swap_seconds = 0.0, seconds or self.swap_seconds

    def suspend(self) -> None:
        """No step follows before the next :meth:`begin`: when the boundary comes is not known."""
        self._last = None

    def go_on(self) -> None:
        """The next inner phase follows at once after all."""
        self._last = clock.monotonic()

    @property
    def suspended(self) -> bool:
        """No inner phase runs, and none follows at once."""
        return self._last is None

    def tick(self) -> None:
        now = clock.monotonic()
        if self._last is not None:
            took = now - self._last
            seen = self.step_seconds
            self.step_seconds = seen + STEP_SMOOTHING * (min(took, LONGEST_STEP * seen) - seen) if seen else took
        self._last = now
        self._remaining -= 1

    @property
    def phase_seconds(self) -> float:
        """Expected seconds of an inner phase; 0 before the first step."""
        return self.step_seconds * self._made(max(self._steps, 1), self._limit) if self.step_seconds else 0.0

    @property
    def time_up(self) -> bool:
        """The phase's time is over, whatever number of steps was made."""
        return clock.monotonic() >= self._until

    def rate(self, per_step: float) -> float:
        """``per_step``, an amount a step, as an amount a second; 0 before the first step."""
        return per_step / self.step_seconds if self.step_seconds else 0.0

    def eta(self) -> float | None:
        """Seconds until the next boundary; ``None`` when it is not known: before the first timed step, after
        :meth:`suspend`, and while a swap runs and none has succeeded before.

        A boundary that comes before the end of the running swap is postponed by whole phases. If no phase follows, it
        is postponed to the end of the swap. A swap that is overdue is expected to take as long again as it is overdue.
        """
        # the training thread changes them meanwhile
        last, until, steps, swap_until = self._last, self._until, self._remaining, self._swap_until
        if not self.step_seconds or last is None or swap_until == math.inf:
            return None
        now = clock.monotonic()
        eta = max(0.0, self.step_seconds * self._made(steps, until - last) - (now - last) + self.prepare_seconds)
        swap = abs(swap_until - now) if swap_until else 0.0
        limit = self._limit * self._following / self._steps if self._limit < math.inf else math.inf
        late, by = max(0.0, swap - eta), self._made(self._following, limit) * self.step_seconds
        return eta + (math.ceil(late / by) * by if by else late)

    def _made(self, steps: int, seconds: float) -> int:
        """Of so many ``steps``, those of a phase that ends after ``seconds``: the step that runs then is made."""
        return steps if seconds == math.inf else min(steps, math.ceil(max(0.0, seconds) / self.step_seconds))
