"""When a checkpoint is written, and that training goes on meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from peer import clock
from peer.hub.beside import Pusher
from peer.logs import get_logger
from peer.telemetry.metrics import ActivityTimer
from peer.telemetry.report import Reporter
from peer.training.checkpoint import Checkpoints
from peer.training.state import PeerState

log = get_logger("checkpoint")
DISK_SECONDS = 900.0  # for a checkpoint, as long as the recipes let a peer leave


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk."""

    published: Future[bool]
    step: int
    round: int


@dataclass
class Saver:
    """Saves a peer's state, one checkpoint at a time. ``pusher`` pushes those that are due."""

    checkpoints: Checkpoints
    state: PeerState
    reporter: Reporter
    timer: ActivityTimer
    pusher: Pusher | None = None
    _saving: Saving | None = field(default=None, init=False)

    def begin(self) -> None:
        """Write a checkpoint. While it gets on the disk, which may take half a minute, the training goes on."""
        self.end()
        if self._saving is not None:  # the disk still writes the last one
            return
        step, round = self.state.inner.step, self.state.counters.round
        with self.timer("checkpoint"):
            written = self.checkpoints.write(step, self.state.scalars(), self.state.tensors())
        worker = clock.worker("checkpoint")
        self._saving = Saving(worker.submit(self.checkpoints.publish, written), step, round)
        worker.shutdown(wait=False)

    def end(self) -> bool:
        """Wait until the checkpoint is on the disk, and push it if that is due; returns whether it is there."""
        saving, self._saving = self._saving, None
        if saving is None:
            return False
        with self.timer("checkpoint", queued=True):  # the disk's work alone; after an error the accelerator may hang
            try:
                saved = clock.result(saving.published, DISK_SECONDS)
            except TimeoutError:
                log.error("checkpoint of step %d is not saved yet: the disk is slow", saving.step)
                self._saving = saving
                return False
        if saved:
            self.reporter.saved()
            if self.pusher is not None:
                self.pusher.saved(self.checkpoints.path(saving.step), saving.round)
        return saved

    def look(self) -> None:
        """At a boundary: notice a checkpoint that is on the disk, or could not be, and a push that has ended."""
        if self._saving is not None and self._saving.published.done() and not self.end():
            log.warning("training continues without this checkpoint")
        if self.pusher is not None:
            self.pusher.look()

    def save(self) -> bool:
        """Write a checkpoint of this state and wait; returns whether it is on the disk."""
        self.begin()
        saving = self._saving
        if saving is None or (saving.step, saving.round) != (self.state.inner.step, self.state.counters.round):
            self.end()  # the disk still writes an older one
            return False
        return self.end()

    def push_last(self) -> None:
        """The run is done: its last checkpoint is pushed as the peer ends."""
        if self.pusher is not None:
            self.pusher.finish_with(self.checkpoints.path(self.state.inner.step))
