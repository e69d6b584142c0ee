"""The boundary of a peer that waits for each exchange: find a group, exchange one tensor, take the outer step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from peer import clock
from peer.exchange.average import Exchange
from peer.logs import fields, get_logger
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.state import Lineage, State
from peer.rounds.transfer_rule import catch_up_limit
from peer.rounds.types import Group, Grouping, Outcome, Seat
from peer.swarm.state_transfer.download import DonorBehind
from peer.training.boundaries.boundary import Boundary

log = get_logger("boundary")

LONGER = 10.0  # times this peer's momentum, or the distance of the slow weights: the longest momentum to take
LAST_DONORS = 3  # asked by who has lost the last round
REPEAT_PAUSE, LONGEST_REPEAT_PAUSE = 1.0, 10.0  # seconds until the next of them is asked, while they may repeat it
WORSE = 1.2  # times the loss of this peer's slow weights: those of a round later may be so much worse


class Unheard(NamedTuple):
    """A round whose verdict has not come.

    ``lineage``: that of the members that have used its mean, if any have. ``own``: this peer's contribution to it.
    """

    round: int
    lineage: Lineage
    own: Tensor


@dataclass
class Blocking(Boundary):
    """Waits until the exchange has ended."""

    exchange: Exchange
    _unheard: Unheard | None = field(default=None, init=False)

    def cross(self, inner: InnerReport) -> bool:
        """Average with the group and take the outer step. The next inner phase can begin when it returns."""
        self.rollback.trained(inner)
        # After the last step validation batches judge, which takes long. No partner has been found yet that would wait.
        if self.phase_length.steps_left <= 0:
            self.judge()
        averaged = self._attempt()
        if self._repeats(averaged):
            what = fields(round=self.counters.round + 1, outcome=averaged.outcome)
            log.warning("repeating a round without the member that failed: %s detail=%r", what, averaged.detail)
            averaged = _with_bytes_of(averaged, self._attempt())
        with self.phase("apply"), self.outer.slow.changing:
            if averaged.outcome is Outcome.MERGED and isinstance(self.outer, NoLoCo):
                correction = self.outer.merge(averaged.mean)
                self.rollback.begin([(0, correction)], averaged)
            elif averaged.outcome in (Outcome.MERGED, Outcome.ALONE) or not self.outer.equal_replicas:
                self.outer.apply(averaged.mean)
            self.state.cross_boundary(averaged.digest, members=len(averaged.partners) + 1)
        self.report(self.reached(inner), averaged)
        return True

    def _attempt(self) -> Averaged:
        """Find a group and exchange."""
        phase = self.phase
        with phase("match"):
            group = self.presence.group_for(self.counters.round)
            if group.donor is not None:
                group = self.caught_up(group.donor)
            phase_seconds = self.context.progress.phase_seconds
            group = replace(group, tokens=self.counters.phase_tokens, phase_seconds=phase_seconds)
        self.judge()  # after the match: a partner waits longer for the first part than for us to come
        group = self.presence.without_avoided(group)
        with phase("exchange"):
            averaged = self.exchange.average(self.outer.contribution(), group)
        self._note_unheard(averaged)
        self.presence.ended(averaged)
        return averaged

    def abandon(self) -> None:
        """Forget the change whose verdict was lost, too: the state that replaces this one does not have it."""
        super().abandon()
        self._unheard = None

    def finish(self) -> None:
        """As in pairs; and a peer that has lost the last round takes what the group has: no boundary follows."""
        super().finish()
        last = self.reporter.last
        lost = last is not None and last.averaged.outcome not in (Outcome.MERGED, Outcome.ALONE)
        if lost and self.outer.equal_replicas and self.phase_length.steps_left <= 0:
            with self.phase("join"):
                self._take_last()

    def _take_last(self) -> None:
        """From a member that has more. Others may repeat the round meanwhile: they are asked again when they have."""
        others, reason, room = self.presence.others(), "no member has more", self.state.room()
        donors = deque(random.sample(others, min(LAST_DONORS, len(others))))
        pause, until = REPEAT_PAUSE, clock.monotonic() + catch_up_limit(self.context.progress.phase_seconds)
        while donors and not self.context.away:
            it = donors.popleft()
            seat = Seat(it.peer_id, it.name, tuple(it.addresses))
            try:
                state = self.presence.state_of(seat, room, self.counters.round)
            except DonorBehind:
                if clock.monotonic() < until:
                    donors.append(it)
                    clock.sleep(pause)
                    pause = min(2 * pause, LONGEST_REPEAT_PAUSE)
                continue
            more = state is not None and state.lineage.contributions > self.counters.lineage.contributions
            if state is None or not more or state.step != self.state.inner.step:
                continue
            if not (reason := self._objection(state, it.name)):
                self.state.adopt(state)
                log.info("took the weights of the last round: %s", fields(donor=it.name, round=state.round))
                return
        if others:
            log.warning("the last round was lost, so these are not the group's weights: %s", fields(reason=reason))

    def caught_up(self, donor: Seat) -> Group:
        """Take the group's slow weights from ``donor``, then ask for the group again."""
        state = self.presence.state_of(donor, self.state.room())
        if state is None:
            return Group(self.counters.round, lost=f"{donor.name} did not give the group's slow weights")
        if objection := self._objection(state, donor.name):
            self.presence.refuse_state(donor)
            return Group(self.counters.round, lost=objection)
        counted, self._unheard = self._unheard, None
        self.state.rebase(state, counted.own if counted and counted.lineage == state.lineage else None)
        self.cut()  # the donor may have begun its next inner phase, and the group meets at the end of it
        again = self.presence.group_for(self.counters.round)
        return again if again.donor is None else Group(self.counters.round, lost="the group's slow weights changed")

    def _note_unheard(self, averaged: Averaged) -> None:
        """Remember this peer's contribution to a round whose verdict was lost: the others may have used it.

        The lineage of the group says later whether they have (:meth:`caught_up`). The contribution is forgotten when a
        repetition of the round succeeds, and in the next round, when the exchange uses its buffer for another one.
        """
        round, lineage = self.counters.round, self.counters.lineage
        if averaged.unheard and self.outer.equal_replicas:  # others take their own step then
            self._unheard = Unheard(round, lineage.after(averaged.unheard, len(averaged.partners) + 1), averaged.mean)
        elif averaged.outcome in (Outcome.MERGED, Outcome.ALONE) or (self._unheard and self._unheard.round != round):
            self._unheard = None

    def _objection(self, state: State, donor: str) -> str:
        """Why this peer does not take ``state``: one member can say that its weights are the group's."""
        own = self.state.vectors()
        moved = float(torch.dist(state.vectors[0], own[0]))
        for theirs, ours in zip(map(torch.linalg.vector_norm, state.vectors[1:]), own[1:], strict=True):
            if not theirs <= LONGER * max(moved, float(torch.linalg.vector_norm(ours))):
                return f"the momentum of {donor} is too long: {theirs:.4g}"
        if self.validation is not None:
            loss, usual = map(self.validation.loss_of, (state.vectors[0], own[0]))
            if not loss <= WORSE * usual:
                return f"with the slow weights of {donor} the loss is {loss:.4g}, with its own {usual:.4g}"
        return ""

    def _repeats(self, averaged: Averaged) -> bool:
        """Is a member's failure a reason to repeat the round, once, without it?"""
        if self.outer.grouping is not Grouping.EVERYONE or self.context.away:
            return False
        return averaged.culprits[:1] not in ((), (self.presence.peer_id,))


def _with_bytes_of(earlier: Averaged, averaged: Averaged) -> Averaged:
    sent, received = earlier.bytes_sent + averaged.bytes_sent, earlier.bytes_received + averaged.bytes_received
    return replace(averaged, bytes_sent=sent, bytes_received=received)
