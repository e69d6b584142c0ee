"""How long an inner phase is: H steps and less at the end of a run, or what fits into ``run.inner_time``.

Used by every loop: trainer.py, and api/loop.py around a program's own.
"""

from __future__ import annotations

import math
import time

from peer.config.schema import SwarmRunConfig
from peer.rounds.progress import Progress, phase_steps
from peer.training.outer_state import OuterState


class PhaseLength:
    """Of one peer; ``total``: the run's inner steps, infinite when nobody knows."""

    def __init__(self, run: SwarmRunConfig, total: float, state: OuterState, progress: Progress) -> None:
        self._run, self._total, self._state, self._progress = run, total, state, progress
        self._until = math.inf

    def begin(self) -> int:
        """It begins, or goes on; returns the steps to do."""
        steps, limit = self.remaining(), math.inf
        if self._run.inner_time is not None:
            limit = self._run.inner_time * steps / self._run.inner_steps
        self._progress.begin(steps, self._run.inner_steps, limit)
        self._until = time.monotonic() + limit
        return steps

    def steps(self) -> int:
        """Inner steps from the last boundary to the next one: H, and less at the end of the run."""
        left = self._total - self._state.counters.boundary_step
        return phase_steps(self._run.inner_steps, left, self._state.outer.grouping)

    def remaining(self) -> int:
        """Inner steps left to the next boundary."""
        return self.steps() - self._state.counters.phase_steps_done

    def run_ends(self) -> bool:
        """The run has at most one more inner phase."""
        return self._total - self._state.inner.step <= self._run.inner_steps

    @property
    def time_up(self) -> bool:
        """The boundary is here, however many steps were made."""
        return time.monotonic() >= self._until

    def cut(self) -> None:
        """The time is up: the swarm's step goes on as if all steps had been made."""
        self._state.inner.step += self.remaining()
        self._state.counters.phase_steps_done = self.steps()
