"""What a peer does when an inner phase has ended, for trainer.py as for a program's own loop (api/loop.py).

Implementations: blocking.py waits for the exchange, overlapped.py lets it run while the next inner steps do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.swarm.presence import Presence
from peer.telemetry.report import BoundaryReport, Reporter, RoundReport
from peer.training.outer_state import OuterState
from peer.training.resources import Resources


@dataclass
class Boundary(ABC):
    """Ends the rounds of one peer. Used by the training thread."""

    state: OuterState
    presence: Presence
    reporter: Reporter
    resources: Resources

    def __post_init__(self) -> None:
        self.outer, self.counters = self.state.outer, self.state.counters
        self.phase, self.context = self.resources.phase, self.resources.context

    def between_steps(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Call it before each inner step."""

    @abstractmethod
    def cross(self, inner: InnerReport) -> bool:
        """The inner phase has ended: average with others and take the outer step; returns whether the round is over.

        ``False``: the boundary is postponed, and the next inner phase belongs to the same round.
        """

    def finish(self) -> None:  # noqa: B027
        """There is no further inner phase: wait for an exchange that is on its way."""

    def reached(self, inner: InnerReport) -> BoundaryReport:
        """Where this peer is after a boundary."""
        return BoundaryReport(self.counters.round, self.state.inner.step, self.counters.tokens, inner)

    def report(self, boundary: BoundaryReport, mean: Averaged) -> None:
        """A round's exchange has ended; the report's ``seconds`` are since the last report."""
        seconds, idle_share = self.phase.lap(), self.phase.idle_share()
        self.reporter.round(RoundReport(boundary, mean, seconds, idle_share, self.presence.size))
