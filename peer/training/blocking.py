"""What a peer does at a boundary, whoever trains between two of them: trainer.py, or somebody's own loop (own/loop.py).

match: who stands here too? → exchange: swap one tensor → apply: the outer step
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peer.exchange.average import Exchange
from peer.process import Stop
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Grouping, Outcome
from peer.swarm.presence import Presence
from peer.telemetry.metrics import PhaseClock
from peer.training.outer_state import OuterState

MERGED, ALONE = Outcome.MERGED, Outcome.ALONE
TRIES = 2  # of one round


class Crossing:
    """Stands at the boundary until the exchange has ended."""

    def __init__(
        self, state: OuterState, presence: Presence, exchange: Exchange[Any], phase: PhaseClock, stop: Stop
    ) -> None:
        self.state, self.outer, self.counters = state, state.outer, state.counters
        self.presence, self.exchange, self.phase, self.stop = presence, exchange, phase, stop

    def cross(self) -> Averaged:
        """The outer step with whoever is met; behind it the next inner phase can begin."""
        phase = self.phase
        for _ in range(TRIES):
            with phase("match"):
                group = replace(self.group(), tokens=self.counters.phase_tokens)
            with phase("exchange"):
                mean = self.exchange.average(self.outer.contribution(), group)
            if not self.repeats(mean):
                break
        with phase("apply"), self.outer.slow.changing():
            if mean.outcome in (MERGED, ALONE) or not self.outer.equal_replicas:
                self.outer.apply(mean.mean)
            self.state.cross_boundary(mean.digest, members=len(mean.partners) + 1)
        return mean

    def group(self) -> Group:
        """Who averages at this boundary. A peer whose slow weights are not the group's takes them first."""
        group = self.presence.group_for(self.counters.round)
        if group.behind is None:
            return group
        state = self.presence.state_of(group.behind, self.state.room())
        if state is None:
            return Group(self.counters.round, lost=f"{group.behind.name} did not give the group's slow weights")
        self.state.catch_up(state)
        again = self.presence.group_for(self.counters.round)
        return again if again.behind is None else Group(self.counters.round, lost="the group's slow weights changed")

    def repeats(self, mean: Averaged) -> bool:
        """A group's round that failed by another member is repeated once, without that member."""
        self.presence.ended(mean)
        if self.outer.grouping is not Grouping.EVERYONE or self.stop.requested:
            return False
        return mean.culprit not in ("", self.presence.peer_id)
