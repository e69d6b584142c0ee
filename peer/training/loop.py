"""What every loop of a peer has around it: when it is done, what it counts and reports, when it evaluates and saves.

Next stations: trainer.py, whose loop waits for each swap, and overlapped.py, whose loop does not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from peer.config.schema import Config
from peer.errors import RunError
from peer.process import Stop
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.progress import Progress
from peer.swarm.presence import Presence
from peer.telemetry.metrics import PhaseClock
from peer.telemetry.report import Counted, Reporter, RoundReport
from peer.training.catch_up import join_late
from peer.training.checkpoint import Checkpoints
from peer.training.phase import InnerPhase
from peer.training.state import PeerState


@dataclass(frozen=True)
class Parts:
    """Everything a trainer is put together from; see assemble.py."""

    state: PeerState  # with the inner loop, the outer method and the data stream
    presence: Presence
    checkpoints: Checkpoints
    reporter: Reporter
    phase: PhaseClock
    progress: Progress
    stop: Stop
    validation: list[Tensor]
    other_validation: dict[str, list[Tensor]]


class Training(ABC):
    """Trains until ``run.steps`` of the swarm are done or a stop is asked for."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.inner, self.outer, self.stream = parts.state.inner, parts.state.outer, parts.state.stream
        self.presence, self.phase = parts.presence, parts.phase
        self.counters = parts.state.counters
        self.inner_phase = InnerPhase(config.run, config.run.steps, parts.state, parts.progress)
        self.chance = math.log(config.run.data.tokenizer.vocabulary)
        self.phase.lap()  # the first report's seconds are from here on

    @abstractmethod
    def loop(self) -> None:
        """Rounds until the end. An inner phase that a stop cuts short is gone on with after the resume."""

    def run(self) -> None:
        """Train; raises :class:`RunError` when it cannot go on."""
        if not self.parts.stop.requested:
            self.evaluate()
        self.loop()
        self.save()
        if not self.parts.stop.requested:
            self.evaluate()

    def done(self) -> bool:
        """All steps made, or asked to stop."""
        return self.parts.stop.requested or self.inner.step >= self.config.run.steps

    def batches(self) -> Iterator[Tensor]:
        """Training batches up to the next boundary, which comes after ``run.inner_time`` at the latest."""
        for batch in self.stream.take(self.inner_phase.begin()):
            yield batch
            if self.inner_phase.time_up:
                return

    def remaining(self) -> int:
        """Inner steps left to the next boundary."""
        return self.inner_phase.remaining()

    def account(self, inner: InnerReport) -> None:
        """Count what an inner phase did, and stop before a broken model reaches anybody."""
        self.counters.tokens += inner.tokens
        self.counters.phase_tokens += inner.tokens
        self.counters.phase_steps_done += inner.steps
        if self.inner_phase.time_up and not self.parts.stop.requested:
            self.inner_phase.cut()
        self.parts.reporter.inner(inner)
        if inner.steps and not math.isfinite(inner.loss):
            raise RunError(
                f"the training loss is {inner.loss} at step {self.inner.step}; lower run.inner.learning_rate or "
                "look at the data, then start again: it resumes from the last checkpoint"
            )
        if self.presence.failure:
            self.save()
            raise RunError(f"{self.presence.failure}; the state is saved, start again to go on")

    def counted(self, inner: InnerReport) -> Counted:
        """Where this peer is now, behind a boundary."""
        return Counted(self.counters.round, self.inner.step, self.counters.tokens, inner)

    def report(self, counted: Counted, mean: Averaged) -> None:
        """A round's exchange has ended; ``seconds`` are since the last report."""
        phase = self.phase
        self.parts.reporter.round(RoundReport(counted, mean, phase.lap(), phase.idle_share(), self.presence.size))

    def now_and_then(self) -> None:
        """At a boundary: evaluate and save when it is time."""
        if self.done():
            return
        replaced = join_late(self.parts.state, self.presence, self.phase, self)
        if replaced:
            self.parts.reporter.replaced()
        if self.counters.round % self.config.run.evaluation.every_rounds == 0:
            self.evaluate()
        if replaced or self.counters.round % self.config.peer.checkpoint.every_rounds == 0:
            self.save()

    def own_loss(self) -> float:
        """Validation loss of this replica, nats a token."""
        with self.phase("eval"):
            return self.inner.evaluate(self.parts.validation)

    def loss_of(self, phi: Tensor) -> float:
        """The same of one with these slow weights (flat fp32, host)."""
        with self.parts.state.trying(phi):
            return self.own_loss()

    def evaluate(self) -> None:
        """Validation losses of this replica, into the report."""
        with self.phase("eval"):
            loss = self.own_loss()
            others = {name: self.inner.evaluate(batches) for name, batches in self.parts.other_validation.items()}
        self.parts.reporter.evaluation(self.inner.step, self.counters.tokens, loss, others)

    def save(self) -> None:
        """Write a checkpoint; a full disk is said and survived."""
        with self.phase("checkpoint"):
            state = self.parts.state
            saved = self.parts.checkpoints.save(self.inner.step, state.scalars(), state.tensors())
        if saved:
            self.parts.reporter.saved()
