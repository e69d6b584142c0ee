"""The boundary of a peer that waits for each exchange: find a group, exchange one tensor, take the outer step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from peer.exchange.average import Exchange
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Grouping, Outcome, Seat
from peer.training.boundary import Boundary

ROUND_TRIES = 2  # for one round
WORSE = 1.2  # times the loss of this peer's slow weights: those of a round later may be so much worse


@dataclass
class Blocking(Boundary):
    """Waits until the exchange has ended."""

    exchange: Exchange[Any]

    def cross(self, inner: InnerReport) -> bool:
        """Average with the group and take the outer step. The next inner phase can begin when it returns."""
        phase = self.phase
        self.rollback.trained(inner)
        self.judge()
        for _ in range(ROUND_TRIES):
            with phase("match"):
                group = self.presence.group_for(self.counters.round)
                if group.behind is not None:
                    group = self.caught_up(group.behind)
                group = replace(group, tokens=self.counters.phase_tokens, phase=self.context.progress.phase_seconds)
            with phase("exchange"):
                mean = self.exchange.average(self.outer.contribution(), group)
            if not self.repeats(mean):
                break
        with phase("apply"), self.outer.slow.changing:
            if mean.outcome is Outcome.MERGED and isinstance(self.outer, NoLoCo):
                self.outer.merge(mean.mean)
                self.rollback.begin([(0, mean.mean)], mean)
            elif mean.outcome in (Outcome.MERGED, Outcome.ALONE) or not self.outer.equal_replicas:
                self.outer.apply(mean.mean)
            self.state.cross_boundary(mean.digest, members=len(mean.partners) + 1)
        self.report(self.reached(inner), mean)
        return True

    def caught_up(self, donor: Seat) -> Group:
        """Take the group's slow weights from ``donor``, then ask for the group again."""
        state = self.presence.state_of(donor, self.state.room())
        if state is None:
            return Group(self.counters.round, lost=f"{donor.name} did not give the group's slow weights")
        if self.validation is not None:  # one member can say that its weights are the group's
            loss, own = map(self.validation.loss_of, (state.vectors[0], self.outer.slow.phi))
            if not loss <= WORSE * own:
                self.presence.refuse_state(donor)
                detail = f"with the slow weights of {donor.name} the loss is {loss:.4g}, with its own {own:.4g}"
                return Group(self.counters.round, lost=detail)
        self.state.catch_up(state)
        again = self.presence.group_for(self.counters.round)
        return again if again.behind is None else Group(self.counters.round, lost="the group's slow weights changed")

    def repeats(self, mean: Averaged) -> bool:
        """Report the end of the exchange; returns whether a member's failure is a reason to repeat it without it."""
        self.presence.ended(mean)
        if self.outer.grouping is not Grouping.EVERYONE or self.context.away:
            return False
        return mean.culprits[:1] not in ((), (self.presence.peer_id,))
