"""How many parts of an overlapped swap are opened at each inner step. Pure; belongs to the training thread."""

from __future__ import annotations

LEAST_OPEN = 2  # parts open at once


class OpeningPace:
    """Of one swap: as many parts are open as land in two inner steps, and never more than ``most``.

    ``landing``: parts that land in an inner step, for the next swap.
    """

    def __init__(self, most: int, usual: int = 0) -> None:
        """``usual``: the last swap's ``landing``; 0 without one."""
        self.most, self.landing = most, usual
        self._steps = self._received = 0  # inner steps of this swap; parts received before the last one

    def free(self, opened: int, received: int, sent: int, *, idle: bool = False) -> int:
        """How many more parts may be open, when so many were opened, received and sent: one is open until both.

        Asked once an inner step, which it counts. ``idle``: no inner step is taken, so only ``most`` bounds them.
        """
        free = self.most - (opened - min(received, sent))
        if not idle:
            landed = received - self._received if self._steps else self.landing
            self._received, self._steps = received, self._steps + 1
            self.landing = received // self._steps
            free = min(free, max(LEAST_OPEN, 2 * landed + 1) - (opened - received))
        return max(0, free)
