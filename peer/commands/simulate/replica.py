"""One replica on the simulated clock: the state of a peer, and its figures for the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peer.errors import RunError
from peer.exchange.codec import Codec
from peer.exchange.guard import Guard
from peer.outer.noloco import NoLoCo
from peer.process import Stop
from peer.rounds.contribution import Averaged
from peer.rounds.progress import phase_steps
from peer.rounds.types import Outcome
from peer.training.boundaries.rollback import Rollback, Trial
from peer.training.state import PeerState

if TYPE_CHECKING:
    from peer.commands.simulate.exchanges import OverlappedSwap


@dataclass(eq=False)
class Replica:
    """``speed``: inner steps in a unit of simulated time. ``steps``: of the whole run.

    ``swap_steps``: inner steps during an overlapped swap; 0 when it is waited for.
    """

    name: str
    state: PeerState
    speed: float
    steps: int
    inner_steps: int
    codec: Codec
    guard: Guard
    swap_steps: int = 0
    validation: Sequence[Tensor] = ()  # batches that judge a merge when losses jump after it or no inner step follows
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    last_outcome: Outcome | None = None
    partners: Counter[str] = field(default_factory=Counter)
    met: dict[str, int] = field(default_factory=dict)  # the round in which a partner was met last
    bytes_sent: int = 0
    bytes_received: int = 0
    waited: float = 0.0  # simulated time
    ended: float = 0.0  # simulated time of its last boundary so far
    first_loss: float | None = None
    last_loss: float | None = None
    merged: int = 0  # rounds of a group of equal replicas that its slow weights include
    overlapped: OverlappedSwap | None = None  # a swap that begins with the next inner phase, until it is counted
    target: int = 0  # the inner step at which the phase ends
    harmful: list[str] = field(default_factory=list)  # partners whose merges were undone
    harm: str = ""  # why the corrections of the swap that runs were undone
    stop: Stop = field(default_factory=Stop)  # once it is requested, no step begins

    def __post_init__(self) -> None:
        self.rollback = Rollback(self.state, self._undone, self._sample if self.validation else None)

    @property
    def done(self) -> bool:
        return self.state.inner.step >= self.steps

    @property
    def phase_steps(self) -> int:
        """Inner steps to the next boundary."""
        left = self.steps - self.state.inner.step
        return phase_steps(self.inner_steps, left, self.state.outer.grouping, self.swap_steps)

    @property
    def usual_time(self) -> float:
        """H inner steps in simulated time."""
        return self.inner_steps / self.speed

    @property
    def tokens(self) -> int:
        """Of this round: the weight that it claims for its contribution."""
        return self.state.counters.phase_tokens

    @property
    def pairwise(self) -> NoLoCo:
        """The outer method of a swarm that swaps in pairs."""
        assert isinstance(self.state.outer, NoLoCo)
        return self.state.outer

    def inner_phase(self) -> None:
        if self.overlapped is not None:
            self.overlapped.run()
        else:
            self.judge()
        self.train(self.target - self.state.inner.step)

    def apply(self, mean: Tensor, partner: str = "") -> None:
        """The outer step. ``partner``: with which it was merged."""
        if partner:
            self.try_merge([(0, self.pairwise.merge(mean))], partner)
        else:
            self.state.outer.apply(mean)

    def cross_boundary(self, outcome: Outcome) -> None:
        self.count(outcome)
        self.state.cross_boundary()

    def count(self, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        self.last_outcome = outcome

    def train(self, steps: int) -> None:
        if not steps:
            return
        report = self.state.inner.run(self._batches(steps))
        self.rollback.look()
        self.rollback.trained(report)
        self.state.counters.tokens += report.tokens
        self.state.counters.phase_tokens += report.tokens
        self.first_loss = report.first_loss if self.first_loss is None else self.first_loss
        self.last_loss = report.loss
        if report.broken:
            raise RunError(
                f"{self.name}: {report.broken} at step {self.state.inner.step}; nothing was "
                "averaged from it; lower run.inner.learning_rate or run.outer's, or look at the data"
            )

    def try_merge(self, corrections: Sequence[tuple[int, Tensor]], partner: str = "") -> None:
        """``corrections`` may be undone. They are all of a merge with ``partner``, or those of a swap that runs."""
        self.rollback.begin(corrections, _merge(partner) if partner else None)

    def swapped(self, partner: str) -> None:
        """There are no further corrections."""
        self.rollback.all_applied(_merge(partner))

    def _sample(self) -> list[float]:
        return [self.state.inner.evaluate([batch]) for batch in self.validation]

    def _undone(self, trial: Trial, detail: str) -> None:
        if trial.merge is None:
            self.harm = detail
        else:
            self.harmful.append(trial.merge.partner_id)

    def judge(self) -> None:
        self.rollback.judge_before_next(left=self.steps - self.state.inner.step)

    def _batches(self, steps: int) -> Iterator[Tensor]:
        for batch in self.state.stream.take(steps):
            if self.stop.requested:
                break
            self.rollback.look()
            yield batch


def _merge(partner: str) -> Averaged:
    return Averaged(torch.empty(0), Outcome.MERGED, partners=(partner,), partner_id=partner)
