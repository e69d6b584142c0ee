"""The boundary of a peer that waits for each exchange: find a group, exchange one tensor, take the outer step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from peer import clock
from peer.logs import fields, get_logger
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged, Exchange
from peer.rounds.types import Grouping, Outcome
from peer.training.boundaries.boundary import Boundary
from peer.training.boundaries.group_weights import GroupWeights

log = get_logger("boundary")


@dataclass
class Blocking(Boundary):
    exchange: Exchange

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_weights = GroupWeights(self.state, self.presence, self.context, self.cut, self.validation)
        self._own: Any = None  # this peer's contribution to the round

    def cross(self, inner: InnerReport) -> bool:
        """Average with the group and take the outer step. The next inner phase can begin when it returns."""
        self.rollback.trained(inner)
        # After the last step validation batches judge, which takes long. No partner has been found yet that would wait.
        if self.phase_length.steps_left <= 0:
            self.judge()
        self._prepare()
        averaged = self._attempt()
        if self._repeats(averaged):
            what = fields(round=self.counters.round + 1, outcome=averaged.outcome)
            log.warning("repeating a round without the member that failed: %s detail=%r", what, averaged.detail)
            averaged = _with_bytes_of(averaged, self._attempt())
        with self.timer("apply"), self.outer.slow.changing:
            if averaged.outcome is Outcome.MERGED and isinstance(self.outer, NoLoCo):
                correction = self.outer.merge(averaged.mean)
                self.rollback.begin([(0, correction)], averaged)
            # A failed exchange returns this peer's own contribution: replicas that may differ, as those of pairs, take
            # the step of a group of one; equal ones take none.
            elif not averaged.outcome.failed or not self.outer.equal_replicas:
                self.outer.apply(averaged.mean)
            self.state.cross_boundary(averaged.digest, members=len(averaged.partners) + 1)
        self._own = None
        self.report(self.reached(inner), averaged)
        return True

    def _prepare(self) -> None:
        """Before the match: a group that has formed waits for a member's first message for no longer than a stall. With
        decoupled momentum this is a pass over the model, which each attempt of the round uses.
        """
        began = clock.monotonic()
        with self.timer("apply"):
            self._own = self.outer.contribution()
        self.context.progress.prepare_seconds = clock.monotonic() - began

    def _attempt(self) -> Averaged:
        """Find a group and exchange."""
        timer = self.timer
        with timer("match"):
            group = self.presence.group_for(self.counters.round)
            if group.donor is not None:
                group = self.group_weights.caught_up(group.donor, self._prepare)
            phase_seconds = self.context.progress.phase_seconds
            group = replace(group, tokens=self.counters.phase_tokens, phase_seconds=phase_seconds)
        self.judge()  # after the match: a partner waits longer for the first part than for us to come
        group = self.presence.without_avoided(group)
        with timer("exchange"):
            averaged = self.exchange.average(self._own, group)
        if self.outer.grouping is Grouping.EVERYONE:
            self.group_weights.note_unheard(averaged)
        self.presence.ended(averaged)
        return averaged

    def abandon(self) -> None:
        super().abandon()
        self.group_weights.unheard = None  # the state that comes does not have the change whose verdict was lost

    def finish(self) -> None:
        """As in pairs; and a peer that has lost the last round takes what the group has: no boundary follows."""
        super().finish()
        last = self.reporter.last
        lost = last is not None and last.averaged.outcome.failed
        if lost and self.outer.equal_replicas and self.phase_length.steps_left <= 0:
            with self.timer("join"):
                self.group_weights.take_last()

    def _repeats(self, averaged: Averaged) -> bool:
        """Is a member's failure a reason to repeat the round, once, without it?"""
        if self.outer.grouping is not Grouping.EVERYONE or self.context.away:
            return False
        return averaged.culprits[:1] not in ((), (self.presence.peer_id,))


def _with_bytes_of(earlier: Averaged, averaged: Averaged) -> Averaged:
    sent, received = earlier.bytes_sent + averaged.bytes_sent, earlier.bytes_received + averaged.bytes_received
    return replace(averaged, bytes_sent=sent, bytes_received=received)
