"""The loop of a peer. It gets finished parts, and knows no network and no formula.

inner: H steps of AdamW → match: who stands here too? → exchange: swap one tensor → apply: the outer step
"""

from __future__ import annotations

from dataclasses import replace

import torch

from peer.config import Config
from peer.exchange.average import GroupAverage
from peer.inner import InnerReport
from peer.rounds import Averaged, Group, Grouping, Outcome
from peer.training import Parts, Training

MERGED, ALONE = Outcome.MERGED, Outcome.ALONE
TRIES = 2  # of one round


class Trainer(Training):
    """Stands at each boundary until its exchange has ended."""

    def __init__(self, config: Config, parts: Parts, exchange: GroupAverage) -> None:
        super().__init__(config, parts)
        self.exchange = exchange

    def loop(self) -> None:
        phase = self.phase
        while not self.done():
            with phase("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.remaining():
                return
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
                self.parts.state.cross_boundary(mean.digest, members=len(mean.partners) + 1)
            self.complete(inner, mean)

    def group(self) -> Group:
        """Who averages at this boundary. A peer whose slow weights are not the group's takes them first."""
        group = self.presence.group_for(self.counters.round)
        if group.behind is None:
            return group
        room = [torch.empty_like(vector) for vector in self.parts.state.vectors()]
        state = self.presence.state_of(group.behind, room)
        if state is None:
            return Group(self.counters.round, lost=f"{group.behind.name} did not give the group's slow weights")
        self.parts.state.catch_up(state)
        again = self.presence.group_for(self.counters.round)
        return again if again.behind is None else Group(self.counters.round, lost="the group's slow weights changed")

    def repeats(self, mean: Averaged) -> bool:
        """A group's round that failed by another member is repeated once, without that member."""
        self.presence.avoid(mean.culprit, mean.outcome)
        if self.outer.grouping is not Grouping.EVERYONE or self.parts.stop.requested:
            return False
        return mean.culprit not in ("", self.presence.peer_id)

    def complete(self, inner: InnerReport, mean: Averaged) -> None:
        """A round is done."""
        self.report(self.counted(inner), mean)
        self.now_and_then()
