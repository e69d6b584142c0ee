"""Where this peer stands between two boundaries, as it announces it to those it will meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peer.rounds.progress import Progress


class BoundaryClock:
    """Reads the training thread's progress; belongs to the network thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.here = False
        self._left_phase = 0  # the inner phase whose boundary is behind us

    @contextmanager
    def standing(self, phase: int) -> Iterator[None]:
        """While this peer stands at the boundary that ends inner phase number ``phase``."""
        self.here = True
        try:
            yield
        finally:
            self._left_phase = phase
            self.here = False

    @property
    def between(self) -> bool:
        """A boundary is behind us and the next inner phase has not begun: when it ends nobody can tell yet."""
        return self._progress.phases == self._left_phase

    @property
    def number(self) -> int:
        """Of the inner phase that runs, or that has ended last."""
        return self._progress.phases

    @property
    def phase(self) -> float | None:
        """Expected seconds of a whole inner phase; ``None`` before the first step."""
        return self._progress.phase_seconds

    def eta(self) -> float | None:
        """Seconds to the boundary that the next meeting is for; ``None`` before the first step."""
        if self.here:
            return 0.0
        if self.between:
            return self._progress.phase_seconds
        return self._progress.eta()
