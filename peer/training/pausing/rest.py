"""A pause: the accelerator's memory is free, the others know, and this peer comes back as one that was away.

A checkpoint is written before. The process, the node and the slow weights on the host stay, so a paused peer still
gives its state to newcomers.
"""

from __future__ import annotations

import torch

from peer import clock
from peer.data.prefetch import await_next
from peer.device.memory import is_out_of_memory, release_memory
from peer.errors import RunError, UserError, one_line
from peer.logs import fields, get_logger
from peer.training.checkpoint import how_to_go_on
from peer.training.member import Membership
from peer.training.state import PeerState

log = get_logger("pause")

REST_PERIOD = 0.2  # seconds between two looks at the requests
TRY_AGAIN = 30.0  # seconds after which a peer that could not come back tries again


class Rest:
    """The pauses of one peer. Used by its training thread, between two inner phases or within one."""

    def __init__(self, member: Membership, state: PeerState) -> None:
        self._member, self._state = member, state
        self._timer, self._context = member.resources.timer, member.resources.context
        self._device = member.resources.device

    def until_resumed(self, *, saved: bool) -> bool:
        """Rest while a pause is requested; returns whether training goes on. Nothing of a swap may be open.
        ``saved``: is there a checkpoint of this state?

        Raises :class:`RunError` when the network has failed, or the data is silent.
        """
        pause, stop = self._context.pause, self._context.stop
        if not pause.requested or stop.requested:
            return not stop.requested
        log.info("paused: %s", fields(step=self._state.inner.step, round=self._state.counters.round))
        with pause.rest(), self._timer("paused"):
            self._context.progress.suspend()
            self._free()
            self._member.presence.announce()
            self._wait(saved)
            while not stop.requested and not self._back():
                self._wait(saved, TRY_AGAIN)
        if not stop.requested:
            log.info("resumed: %s", fields(step=self._state.inner.step, round=self._state.counters.round))
            self._member.presence.announce()
        return not stop.requested

    def _wait(self, saved: bool, least: float = 0.0) -> None:
        """Until no pause is requested, and ``least`` seconds have passed; not after a stop."""
        until = clock.monotonic() + least
        while not self._context.stop.requested and (self._context.pause.requested or clock.monotonic() < until):
            if self._member.presence.failure:
                advice = how_to_go_on(self._member.resources.folder.path, saved=saved)
                raise RunError(f"{self._member.presence.failure}; {advice}")
            clock.sleep(REST_PERIOD)

    def _back(self) -> bool:
        """Take the accelerator's memory, and the state of a member that is further; returns whether that succeeded. Not
        before the next batch is there: while it is waited for, that state gets old. It is read during a pause too.
        Raises :class:`RunError` when the source is silent.
        """
        if not await_next(self._state.stream):  # another request, or the network has failed
            return False
        try:
            if self._device.type != "cpu":
                self._state.move_to(self._device)
            self._member.rejoin(restored=False)
        except UserError as error:  # all others train another configuration: so may a single outsider
            log.warning("goes on with its own state: %s", one_line(error))
        except (RuntimeError, RunError) as error:
            if not (isinstance(error, RunError) or is_out_of_memory(error)):
                raise
            log.warning("cannot go on, stays paused and tries again in %.0f s: %s", TRY_AGAIN, one_line(error))
            self._free()
            return False
        return True

    def _free(self) -> None:
        """Move model and optimizer to the host."""
        if self._device.type != "cpu":
            self._state.move_to(torch.device("cpu"))
            release_memory(self._device)
