"""The loop of a peer. It gets finished parts, and knows no network and no formula.

inner: H steps of AdamW → match: who stands here too? → exchange: swap one tensor → apply: the outer step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.checkpoint import Checkpoints
from peer.config import Config
from peer.errors import RunError
from peer.exchange.average import GroupAverage
from peer.inner import InnerReport
from peer.metrics import PhaseClock
from peer.progress import Progress, Stop
from peer.report import Reporter, RoundReport
from peer.rounds import Averaged, Group, Outcome
from peer.schedule import phase_steps
from peer.state import PeerState
from peer.swarm.presence import Presence

MERGED, ALONE = Outcome.MERGED, Outcome.ALONE
TRIES = 2  # of one round


@dataclass(frozen=True)
class Parts:
    """Everything a trainer is put together from; see assemble.py."""

    state: PeerState  # with the inner loop, the outer method and the data stream
    exchange: GroupAverage
    presence: Presence
    checkpoints: Checkpoints
    reporter: Reporter
    phase: PhaseClock
    progress: Progress
    stop: Stop
    validation: list[Tensor]


class Trainer:
    """Trains until ``run.steps`` of the swarm are done or a stop is asked for."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.inner, self.outer, self.stream = parts.state.inner, parts.state.outer, parts.state.stream
        self.exchange, self.presence, self.phase = parts.exchange, parts.presence, parts.phase
        self.counters = parts.state.counters
        self._booked = dict(self.phase.totals)

    def run(self) -> None:
        """Train; raises :class:`RunError` when it cannot go on."""
        self.evaluate()
        self.loop()
        self.save()
        if not self.parts.stop.requested:
            self.evaluate()

    def loop(self) -> None:
        """Rounds until the end. An inner phase that a stop cuts short is gone on with after the resume."""
        phase = self.phase
        while not self.done():
            with phase("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.remaining():
                return
            for _ in range(TRIES):
                with phase("match"):
                    group = self.group()
                with phase("exchange"):
                    mean = self.exchange.average(self.outer.contribution(), group)
                if not self.repeats(mean):
                    break
            with phase("apply"), self.outer.slow.changing():
                if mean.outcome in (MERGED, ALONE) or not self.outer.equal_replicas:
                    self.outer.apply(mean.mean)
                self.parts.state.cross_boundary(mean.digest)
            self.complete(inner, mean)

    def group(self) -> Group:
        """Who averages at this boundary. A peer whose slow weights are not the group's takes them first."""
        group = self.presence.group_for(self.counters.round)
        if group.behind is None:
            return group
        room = [torch.empty_like(vector) for vector in self.parts.state.vectors()]
        state = self.presence.state_of(group.behind, room)
        if state is None:
            return Group(self.counters.round, lost=f"{group.behind.name} did not give the group's slow weights")
        self.parts.state.catch_up(state)
        again = self.presence.group_for(self.counters.round)
        return again if again.behind is None else Group(self.counters.round, lost="the group's slow weights changed")

    def repeats(self, mean: Averaged) -> bool:
        """A group's round that failed by another member is repeated once, without that member."""
        self.presence.avoid(mean.culprit, mean.outcome)
        return bool(mean.culprit) and not self.parts.stop.requested and mean.culprit != self.presence.peer_id

    def done(self) -> bool:
        """All steps made, or asked to stop."""
        return self.parts.stop.requested or self.inner.step >= self.config.run.steps

    def batches(self) -> Iterator[Tensor]:
        """Training batches up to the next boundary."""
        self.parts.progress.begin(self.remaining(), self.config.run.inner_steps)
        return self.stream.take(self.remaining())

    def phase_steps(self) -> int:
        """Inner steps from the last boundary to the next one: H, and less at the end of the run."""
        left = self.config.run.steps - self.counters.boundary_step
        return phase_steps(self.config.run.inner_steps, left, self.outer.grouping)

    def remaining(self) -> int:
        """Inner steps left to the next boundary."""
        return self.phase_steps() - self.counters.phase_steps_done

    def account(self, inner: InnerReport) -> None:
        """Count what an inner phase did, and stop before a broken model reaches anybody."""
        self.counters.tokens += inner.tokens
        self.counters.phase_steps_done += inner.steps
        self.parts.reporter.inner(inner)
        if inner.steps and not math.isfinite(inner.loss):
            raise RunError(
                f"the training loss is {inner.loss} at step {self.inner.step}; lower run.inner.learning_rate or "
                "look at the data, then start again: it resumes from the last checkpoint"
            )
        if self.presence.failure:
            self.save()
            raise RunError(f"{self.presence.failure}; the state is saved, start again to go on")

    def complete(self, inner: InnerReport, mean: Averaged) -> None:
        """A round is done: count, report, and now and then evaluate and save."""
        counters = self.counters
        booked = {phase: total - self._booked[phase] for phase, total in self.phase.totals.items()}
        self._booked = dict(self.phase.totals)
        self.parts.reporter.round(
            RoundReport(
                round=counters.round,
                step=self.inner.step,
                tokens=counters.tokens,
                inner=inner,
                averaged=mean,
                seconds=booked,
                idle_share=self.phase.idle_share(),
                members=self.presence.size,
            )
        )
        if self.done():
            return
        if counters.round % self.config.run.evaluation.every_rounds == 0:
            self.evaluate()
        if counters.round % self.config.peer.checkpoint.every_rounds == 0:
            self.save()

    def evaluate(self) -> None:
        """Validation loss of this replica."""
        with self.phase("eval"):
            loss = self.inner.evaluate(self.parts.validation)
        self.parts.reporter.evaluation(self.inner.step, self.counters.tokens, loss)

    def save(self) -> None:
        """Write a checkpoint; a full disk is said and survived."""
        with self.phase("checkpoint"):
            state = self.parts.state
            self.parts.checkpoints.save(self.inner.step, state.scalars(), state.tensors())
