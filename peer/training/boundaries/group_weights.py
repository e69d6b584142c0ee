"""The slow weights that a group of everyone has in common, and what a member does that has others.

At a boundary the leader names it a donor (swarm/grouping/leader.py). After the run's last boundary a member that has
lost its round asks others by itself.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from peer import clock
from peer.logs import fields, get_logger
from peer.process import LoopContext
from peer.rounds.contribution import Averaged, norm, parts
from peer.rounds.state import Lineage, State
from peer.rounds.transfer_rule import LONGEST_REPEAT_PAUSE, catch_up_limit
from peer.rounds.types import Group, Seat
from peer.swarm.presence import Presence
from peer.swarm.state_transfer.download import DonorBehind
from peer.training.outer_state import OuterState
from peer.training.validation import WORSE, Validation

log = get_logger("boundary")

# Times this peer's momentum, or the distance of the slow weights: the longest momentum to take. An order of magnitude
# has room for the rounds that this peer lacks, and bounds how far a lie moves the weights.
LONGEST_MOMENTUM = 10.0
LAST_DONORS = 3  # asked by who has lost the last round
REPEAT_PAUSE = 1.0  # seconds until the next of them is asked, while they may repeat it; twice as many each time


class Unheard(NamedTuple):
    """A round whose verdict has not come.

    ``lineage``: that of the members that have used its mean, if any have. ``own``: this peer's contribution to it.
    """

    round: int
    lineage: Lineage
    own: Tensor


@dataclass
class GroupWeights:
    """Used by the training thread. ``cut``: ends the inner phase."""

    state: OuterState
    presence: Presence
    context: LoopContext
    cut: Callable[[], None]
    validation: Validation | None = None
    unheard: Unheard | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.outer, self.counters = self.state.outer, self.state.counters

    def caught_up(self, donor: Seat, prepare: Callable[[], None] = lambda: None) -> Group:
        """Take the group's slow weights from ``donor``, ``prepare`` a contribution, then ask for the group again."""
        state = self.presence.state_of(donor, self.state.room())
        if state is None:
            return Group(self.counters.round, lost=f"{donor.name} did not give the group's slow weights")
        if objection := self._objection(state, donor.name):
            self.presence.refuse_state(donor)
            return Group(self.counters.round, lost=objection)
        counted, self.unheard = self.unheard, None
        self.state.rebase(state, counted.own if counted and counted.lineage == state.lineage else None)
        self.cut()  # the donor may have begun its next inner phase, and the group meets at the end of it
        prepare()
        again = self.presence.group_for(self.counters.round)
        return again if again.donor is None else Group(self.counters.round, lost="the group's slow weights changed")

    def note_unheard(self, averaged: Averaged) -> None:
        """Remember this peer's contribution to a round whose verdict was lost: the others may have used it.

        The lineage of the group says later whether they have (:meth:`caught_up`). The contribution is forgotten when a
        repetition of the round succeeds, and in the next round, when the exchange uses its buffer for another one.
        """
        round, lineage = self.counters.round, self.counters.lineage
        if averaged.unheard and self.outer.equal_replicas:  # others take their own step then
            self.unheard = Unheard(round, lineage.after(averaged.unheard, len(averaged.partners) + 1), averaged.mean)
        elif not averaged.outcome.failed or (self.unheard and self.unheard.round != round):
            self.unheard = None

    def take_last(self) -> None:
        """Take the weights of the last round from a member that has them. Others may repeat the round meanwhile: they
        are asked again when they have, and who was asked before that stays (:meth:`Presence.stay`).
        """
        others, room = self.presence.others(), self.state.room()
        reason = "no member gave newer ones" if others else "all others have left"
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
        log.warning("the last round was lost, so these are not the group's weights: %s", fields(reason=reason))

    def _objection(self, state: State, donor: str) -> str:
        """Why this peer does not take ``state``: one member can say that its weights are the group's."""
        own = self.state.vectors()
        # part by part: the difference of the whole would be one more copy of the model, and the group waits
        borders = parts(own[0].numel())
        moved = math.hypot(*(float(torch.dist(state.vectors[0][a:b], own[0][a:b])) for a, b in borders))
        for theirs, ours in zip(map(norm, state.vectors[1:]), map(norm, own[1:]), strict=True):
            if not theirs <= LONGEST_MOMENTUM * max(moved, ours):
                return f"the momentum of {donor} is too long: {theirs:.4g}"
        if self.validation is not None:
            loss, usual = map(self.validation.loss_of, (state.vectors[0], own[0]))
            if not loss <= WORSE * usual:
                return f"with the slow weights of {donor} the loss is {loss:.4g}, with its own {usual:.4g}"
        return ""
