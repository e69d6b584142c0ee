"""The loop of a peer. It knows no network and no formula.

inner: H steps → boundary: match, exchange, apply (boundaries/) → evaluation, checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from peer.config.schema import Config
from peer.errors import RunError, UserError
from peer.p2p.event_loop import NoAnswer
from peer.replica.inner_loop import InnerReport
from peer.training.checkpoint import NEW_RUN_ADVICE, how_to_go_on
from peer.training.member import Membership
from peer.training.pausing.rest import Rest
from peer.training.saving import Saver
from peer.training.state import PeerState
from peer.training.validation import Validation


class Trainer:
    """Trains until the swarm has done ``run.steps`` or a stop is requested. ``member`` has joined."""

    def __init__(
        self, config: Config, member: Membership, state: PeerState, saver: Saver, validation: Validation
    ) -> None:
        self.config, self.member, self.state = config, member, state
        self.inner, self.stream, self.counters = state.inner, state.stream, state.counters
        self.timer, self.context = member.resources.timer, member.resources.context
        self.rest = Rest(member, state)
        self.phase_length, self.boundary = member.phase_length, member.make_boundary(validation)
        self.saver, self.validation = saver, validation
        self._failed: RunError | UserError | None = None  # ended the inner phase
        self.timer.lap()  # the first report begins here

    def run(self) -> None:
        """Train; raises :class:`RunError` when it cannot continue."""
        try:
            self._run()
        finally:
            self.saver.end()

    def _run(self) -> None:
        if not self.context.away:
            self.evaluate()
        going_on = True
        while going_on:
            try:
                self.loop()
                self.boundary.finish()
            except NoAnswer as error:
                raise RunError(f"{error}; {self._advice(saved=self.saver.save())}") from None
            saved = self.saver.save()
            going_on = not self.finished and self.rest.until_resumed(saved=saved)
        if not self.context.stop.requested:
            self.evaluate()
        if not saved and not self.saver.save():  # the disk may have room by now
            raise RunError(f"step {self.inner.step}: {self._advice(saved=False)}")
        if not self.context.stop.requested:
            self.saver.push_last()
            self.member.stay()

    def loop(self) -> None:
        """Rounds until the end, a stop or a pause. After these the resumed peer continues the inner phase."""
        while not self.done():
            with self.timer("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.phase_length.remaining():
                return
            if self.boundary.cross(inner):
                self.now_and_then()

    def done(self) -> bool:
        """All steps are made, or this peer is asked to stop or to pause."""
        return self.context.away or self.finished

    @property
    def finished(self) -> bool:
        return self.inner.step >= self.config.run.steps

    def batches(self) -> Iterator[Tensor]:
        """Training batches up to the next boundary, for ``run.inner_time``, or until the data fails."""
        for batch in self._data():
            try:
                self.boundary.between_steps()
            except NoAnswer as error:  # the steps before it are counted first
                self._failed = error
                return
            yield batch
            if self.context.progress.time_up:
                return

    def _data(self) -> Iterator[Tensor]:
        """What fails is raised when the steps before it are counted and saved."""
        try:
            yield from self.stream.take(self.phase_length.begin())
        except (RunError, UserError) as error:
            self._failed = error

    def account(self, inner: InnerReport) -> None:
        """Count an inner phase. Raises what ended it, and :class:`RunError` before others get a broken model."""
        self.counters.add(inner.steps, inner.tokens)
        if self.context.progress.time_up and not self.context.away:
            self.boundary.cut()
        self.member.reporter.inner(inner)
        if broken := inner.broken:
            raise RunError(
                f"{broken} at step {self.inner.step}; look at the data and start again, which resumes from the last "
                f"checkpoint, or, with another learning rate, {NEW_RUN_ADVICE}"
            )
        if self.member.presence.failure:
            advice = self._advice(saved=self.saver.save())
            raise RunError(f"{self.member.presence.failure}; {advice}")
        if self._failed is not None:
            if not isinstance(self._failed, NoAnswer):
                self.saver.save()
            raise self._failed

    def now_and_then(self) -> None:
        """After a boundary: evaluate and save when they are due."""
        if self.done():
            return
        self.saver.look()
        replaced = self.member.join_late(self.validation)
        if self.counters.round % self.config.run.evaluation.every_rounds == 0:
            self.evaluate()
        due = self.counters.round % self.config.peer.checkpoint.every_rounds == 0
        if replaced or due:
            self.saver.begin()

    def evaluate(self) -> None:
        """Report this replica's validation losses."""
        loss, others = self.validation.losses()
        self.member.reporter.evaluation(self.inner.step, self.counters.tokens, loss, others)

    def _advice(self, *, saved: bool) -> str:
        return how_to_go_on(self.member.resources.folder.path, saved=saved)
