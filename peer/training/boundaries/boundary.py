"""When an inner phase ends, and what a peer does then; for trainer.py and for a program's own loop (api/loop.py).

Implementations: blocking.py waits for the exchange, overlapped.py runs it during the next inner steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from peer import clock
from peer.config.schema import SwarmRunConfig
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.pairing_rule import last_swaps
from peer.rounds.progress import Progress, phase_steps
from peer.rounds.types import Outcome
from peer.swarm.presence import Presence
from peer.telemetry.report import BoundaryReport, Reporter, RoundReport
from peer.training.boundaries.rollback import Rollback, Trial
from peer.training.outer_state import OuterState
from peer.training.resources import Resources
from peer.training.validation import Validation

NO_STEPS = InnerReport(0, 0, math.nan, math.nan, math.nan, math.nan, 0.0, 0)


@dataclass
class Boundary(ABC):
    """Ends the rounds of one peer. Used by the training thread."""

    state: OuterState
    presence: Presence
    reporter: Reporter
    resources: Resources
    phase_length: PhaseLength
    validation: Validation | None = field(default=None, kw_only=True)  # to check weights that others gave

    def __post_init__(self) -> None:
        self.outer, self.counters = self.state.outer, self.state.counters
        self.timer, self.context = self.resources.timer, self.resources.context
        self._merged = False  # the last round
        self.rollback = Rollback(self.state, self._undone, self.validation.sample_losses if self.validation else None)

    def between_steps(self) -> None:
        """Call it once between two inner steps, and once before the first: it looks at the loss of the step before, and
        opens parts for the next one. A running swap counts these calls as inner steps.
        """
        self.rollback.look()

    def cut(self) -> None:
        """The inner phase ends now, whatever number of steps was made."""
        if left := self.phase_length.remaining():
            self.rollback.skip(left)
            self.phase_length.cut()

    @abstractmethod
    def cross(self, inner: InnerReport) -> bool:
        """The inner phase has ended: average with others and take the outer step; returns whether the round is over.

        ``False``: the boundary is postponed, and the next inner phase belongs to the same round.
        """

    def await_swap(self) -> None:  # noqa: B027
        """Wait for the end of an overlapped swap that still runs or is about to begin."""

    def abandon(self) -> None:
        """Another state replaces this one: an exchange that has not ended changes nothing any more."""
        self.presence.call_off("another state replaces this one")

    def finish(self) -> None:
        """There is no further inner phase: wait for the swap that runs, and judge what it changed. At the end of a run
        of pairs, swap some more times without training (outer/noloco.py).
        """
        self.await_swap()
        if self.phase_length.steps_left <= 0 and isinstance(self.outer, NoLoCo):
            if self.context.progress.phase_seconds:  # else this run was done when the process began
                self._merge_at_the_end(self.outer)
            self.presence.matchmaking.end_swaps()
        self.judge()

    def _merge_at_the_end(self, outer: NoLoCo) -> None:
        outer.end_run()
        self.presence.matchmaking.end_run()
        self.rollback.training_ended()
        for _ in range(last_swaps(self.presence.matchmaking.last_partners() + 1, self._merged)):
            if self.context.away or not self.presence.matchmaking.last_partners():
                return
            self.cross(NO_STEPS)
            self.await_swap()

    def judge(self) -> None:
        """Judge the last merge before the next one."""
        progress, began = self.context.progress, clock.monotonic()
        self.rollback.judge_before_next(left=self.phase_length.steps_left, sampled=not self.context.stop.requested)
        progress.judge_seconds = max(progress.judge_seconds, clock.monotonic() - began)

    def _undone(self, trial: Trial, detail: str) -> None:
        if trial.merge is not None:
            self.presence.avoid(trial.merge.partner_id, Outcome.POISONED)
            self.reporter.undone(trial.merge.partners[0], detail)

    def reached(self, inner: InnerReport) -> BoundaryReport:
        """This peer's position after a boundary."""
        return BoundaryReport(self.counters.round, self.state.inner.step, self.counters.tokens, inner)

    def report(self, boundary: BoundaryReport, averaged: Averaged) -> None:
        """A round's exchange has ended."""
        self._merged = averaged.outcome is Outcome.MERGED
        self.context.progress.swap_took(averaged.seconds if self._merged else 0.0)
        seconds, idle_share = self.timer.lap(), self.timer.idle_share()
        self.reporter.round(RoundReport(boundary, averaged, seconds, idle_share, self.presence.size))


class PhaseLength:
    """Length of an inner phase: H steps, fewer at the end of the run, or what fits into ``run.inner_time``.

    ``total``: the run's inner steps, infinite when unknown.
    """

    def __init__(self, run: SwarmRunConfig, total: float, state: OuterState, progress: Progress) -> None:
        self._run, self._total, self._state, self._progress = run, total, state, progress
        self._swap = 0.0  # inner steps of an overlapped swap, as this phase began

    def begin(self) -> int:
        """The phase begins or continues; returns the steps that remain."""
        if self._run.exchange.overlap and not self._state.counters.phase_steps_done:
            self._swap = self._progress.swap_steps
        steps = self.remaining()
        following = self._steps_of_phase(self.steps_left - steps)
        self._progress.begin(steps, self._run.inner_steps, self._run.inner_time or math.inf, following)
        return steps

    def remaining(self) -> int:
        """Inner steps to the next boundary."""
        counters = self._state.counters
        return max(0, self._steps_of_phase(self._total - counters.boundary_step) - counters.phase_steps_done)

    def _steps_of_phase(self, left: float) -> int:
        return phase_steps(self._run.inner_steps, max(0.0, left), self._state.outer.grouping, self._swap)

    @property
    def steps_left(self) -> float:
        """Inner steps to the end of the run; 0 or less when it is over."""
        return self._total - self._state.inner.step

    def cut(self) -> None:
        """End the phase now: the swarm's step counts as if all steps had been made."""
        left = self.remaining()
        self._state.inner.step += left
        self._state.counters.phase_steps_done += left
