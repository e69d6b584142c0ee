"""How many parts of an overlapped swap are opened at each inner step. Pure; belongs to the training thread."""

from __future__ import annotations

LEAST_OPEN = 2  # parts open at once
# times the usual number of parts: a step in which more land was long (an evaluation), and says nothing of how long a
# part is on its way
LONG_STEP = 3.0


class OpeningPace:
    """Of one swap: twice as many parts are open as land while one is on its way, and never more than ``most``. So the
    line is full, and a part waits for about as long as it travels.

    ``landing``: parts that land while one is on its way, for the next swap.
    """

    def __init__(self, most: int, usual: float = 0.0) -> None:
        """``usual``: the last swap's ``landing``; 0 without one."""
        self.most, self.landing = most, usual
        self._steps: list[tuple[int, int]] = []  # parts that were opened and received before each inner step
        self._way = 0  # inner steps that a part is on its way, at least: with more open parts it waits; 0 if unknown

    def free(self, opened: int, received: int, sent: int, *, idle: bool = False) -> int:
        """How many more parts may be open, when so many were opened, received and sent: one is open until both.

        Asked once an inner step, which it counts. ``idle``: no inner step is taken, so only ``most`` bounds them.
        """
        free = self.most - (opened - min(received, sent))
        if not idle:
            landed = self._landed(opened, received)
            free = min(free, max(LEAST_OPEN, int(2 * landed) + 1) - (opened - received))
        return max(0, free)

    def _landed(self, opened: int, received: int) -> float:
        self._steps.append((opened, received))
        last = len(self._steps) - 1
        landed = received - self._steps[-2][1] if last else 0
        long = landed > LONG_STEP * received / (last + 1) + LEAST_OPEN
        if landed and not long:
            before = last - 1  # the last inner step before which the newest part that has landed was not open
            while before and self._steps[before][0] >= received:
                before -= 1
            self._way = min(self._way or last, last - before)
        if not self._way:
            return self.landing
        self.landing = received * self._way / len(self._steps)
        return received - self._steps[max(0, last - self._way)][1]
