"""The loop of a peer. It knows no network and no formula.

inner: H steps → boundary: match, exchange, apply (boundaries/) → evaluation, checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from peer import clock
from peer.config.schema import Config
from peer.errors import RunError, UserError
from peer.hub.beside import Pusher
from peer.logs import get_logger
from peer.p2p.event_loop import NoAnswer
from peer.replica.inner_loop import InnerReport
from peer.training.checkpoint import NEW_RUN_ADVICE, Checkpoints, how_to_go_on
from peer.training.member import Membership
from peer.training.pausing.rest import Rest
from peer.training.state import PeerState
from peer.training.validation import Validation

log = get_logger("trainer")
DISK_SECONDS = 900.0  # for a checkpoint, as long as the recipes let a peer leave


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk."""

    published: Future[bool]
    step: int
    round: int


class Trainer:
    """Trains until the swarm has done ``run.steps`` or a stop is requested. ``member`` has joined."""

    def __init__(
        self,
        config: Config,
        member: Membership,
        state: PeerState,
        checkpoints: Checkpoints,
        validation: Validation,
        pusher: Pusher | None = None,
    ) -> None:
        self.config, self.member, self.state = config, member, state
        self.inner, self.stream, self.counters = state.inner, state.stream, state.counters
        self.phase, self.context = member.resources.phase, member.resources.context
        self.rest = Rest(member, state)
        self.phase_length, self.boundary = member.phase_length, member.boundary(validation)
        self.checkpoints, self.validation, self.pusher = checkpoints, validation, pusher
        self.phase.lap()  # the first report begins here

    _failed: RunError | UserError | None = None  # ended the inner phase
    _saving: Saving | None = None

    def run(self) -> None:
        """Train; raises :class:`RunError` when it cannot continue."""
        try:
            self._run()
        finally:
            self.end_save()

    def _run(self) -> None:
        if not self.context.away:
            self.evaluate()
        going_on = True
        while going_on:
            try:
                self.loop()
                self.boundary.finish()
            except NoAnswer as error:
                advice = how_to_go_on(self.member.resources.folder.path, saved=self.save())
                raise RunError(f"{error}; {advice}") from None
            saved = self.save()
            going_on = not self.finished and self.rest.until_resumed(saved=saved)
        if not self.context.stop.requested:
            self.evaluate()
        if not saved and not self.save():  # the disk may have room by now
            raise RunError(f"step {self.inner.step}: {how_to_go_on(self.member.resources.folder.path, saved=False)}")
        if self.pusher is not None and not self.context.stop.requested:
            self.pusher.finish_with(self.checkpoints.path(self.inner.step))

    def loop(self) -> None:
        """Rounds until the end, a stop or a pause. After these the resumed peer continues the inner phase."""
        while not self.done():
            with self.phase("inner"):
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
        """All steps are made."""
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
            if self.phase_length.time_up:
                return

    def _data(self) -> Iterator[Tensor]:
        """What fails is raised when the steps before it are counted and saved."""
        try:
            yield from self.stream.take(self.phase_length.begin())
        except (RunError, UserError) as error:
            self._failed = error

    def account(self, inner: InnerReport) -> None:
        """Count an inner phase. Raises :class:`RunError` before a broken model is sent to others, and what has ended
        the phase.
        """
        self.counters.tokens += inner.tokens
        self.counters.phase_tokens += inner.tokens
        self.counters.phase_steps_done += inner.steps
        if self.phase_length.time_up and not self.context.away:
            self.boundary.cut()
        self.member.reporter.inner(inner)
        if broken := inner.broken:
            raise RunError(
                f"{broken} at step {self.inner.step}; look at the data and start again, which resumes from the last "
                f"checkpoint, or, with another learning rate, {NEW_RUN_ADVICE}"
            )
        if self.member.presence.failure:
            advice = how_to_go_on(self.member.resources.folder.path, saved=self.save())
            raise RunError(f"{self.member.presence.failure}; {advice}")
        if self._failed is not None:
            if not isinstance(self._failed, NoAnswer):
                self.save()
            raise self._failed

    def now_and_then(self) -> None:
        """After a boundary: evaluate and save when they are due."""
        if self.done():
            return
        if self._saving is not None and self._saving.published.done() and not self.end_save():
            log.warning("training continues without this checkpoint")
        if self.pusher is not None:
            self.pusher.look()
        replaced = self.member.join_late(self.validation)
        if self.counters.round % self.config.run.evaluation.every_rounds == 0:
            self.evaluate()
        due = self.counters.round % self.config.peer.checkpoint.every_rounds == 0
        if replaced or due:
            self.begin_save()

    def evaluate(self) -> None:
        """Report this replica's validation losses."""
        loss, others = self.validation.losses()
        self.member.reporter.evaluation(self.inner.step, self.counters.tokens, loss, others)

    def save(self) -> bool:
        """Write a checkpoint; returns whether it is on the disk."""
        self.begin_save()
        own, saving = (self.inner.step, self.counters.round), self._saving
        return self.end_save() and saving is not None and (saving.step, saving.round) == own

    def begin_save(self) -> None:
        """Write a checkpoint. While it gets on the disk, which may take half a minute, the training goes on."""
        self.end_save()
        if self._saving is not None:  # the disk still writes the last one
            return
        with self.phase("checkpoint"):
            written = self.checkpoints.write(self.inner.step, self.state.scalars(), self.state.tensors())
        worker = clock.worker("checkpoint")
        self._saving = Saving(worker.submit(self.checkpoints.publish, written), self.inner.step, self.counters.round)
        worker.shutdown(wait=False)

    def end_save(self) -> bool:
        """Wait until the checkpoint that was begun is on the disk, and push it if that is due; returns whether it is
        there.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return False
        with self.phase("checkpoint"):
            try:
                saved = clock.result(saving.published, DISK_SECONDS)
            except TimeoutError:
                log.error("checkpoint of step %d is not saved yet: the disk is slow", saving.step)
                self._saving = saving
                return False
        if saved:
            self.member.reporter.saved()
            if self.pusher is not None:
                self.pusher.saved(self.checkpoints.path(saving.step), saving.round)
        return saved
