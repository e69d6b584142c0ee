"""The same average between peers of one process: no stream, no copy on a wire. For tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.config.schema import ExchangeConfig
from peer.exchange.average import Verdict, copy_own, merge
from peer.exchange.guard import Guard, judge
from peer.rounds.contribution import Averaged, Contribution
from peer.rounds.types import Group, Outcome


@dataclass
class _Meeting:
    offers: dict[str, Tensor] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


class Hub:
    """Where the peers of one process lay down what they offer. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meetings: dict[tuple[int, frozenset[str]], _Meeting] = {}


class LoopbackExchange:
    """:class:`peer.exchange.average.Exchange` between threads."""

    def __init__(self, hub: Hub, name: str, numel: int, settings: ExchangeConfig) -> None:
        self._hub, self._name, self._settings = hub, name, settings
        self._buffer = torch.empty(numel, dtype=torch.float32)
        self._guard = Guard()

    def average(self, contribution: Contribution, group: Group) -> Averaged:
        if not group.links:
            copy_own(contribution, self._buffer)
            return Averaged(self._buffer, Outcome.ALONE)
        (link,) = group.links
        began = time.monotonic()
        verdict = self._swap(contribution, link.peer_id, group.round)
        if verdict.outcome is Outcome.MERGED:
            merge(contribution, self._buffer)
        else:
            copy_own(contribution, self._buffer)
        size = 4 * contribution.numel if verdict.outcome is not Outcome.TIMEOUT else 0
        return Averaged(
            mean=self._buffer,
            outcome=verdict.outcome,
            partners=(link.name,),
            bytes_sent=size,
            bytes_received=size,
            seconds=time.monotonic() - began,
            distance=verdict.distance,
            detail=verdict.detail,
            reason=verdict.reason,
        )

    def _swap(self, own: Contribution, partner: str, round: int) -> Verdict:
        key = (round, frozenset((self._name, partner)))
        hub, deadline = self._hub, time.monotonic() + self._settings.stall
        copy_own(own, self._buffer)
        with hub.changed:
            meeting = hub.meetings.setdefault(key, _Meeting())
            meeting.offers[self._name] = self._buffer.clone()
            hub.changed.notify_all()
            if not self._wait(lambda: partner in meeting.offers, deadline):
                meeting.offers.pop(self._name)
                return Verdict(Outcome.TIMEOUT, detail="the partner did not come")
        self._buffer.copy_(meeting.offers[partner])
        verdict = judge(own, self._buffer, self._guard, partner)
        with hub.changed:
            meeting.verdicts[self._name] = verdict
            hub.changed.notify_all()
            if not self._wait(lambda: partner in meeting.verdicts, deadline):
                return Verdict(Outcome.TIMEOUT, detail="the partner did not acknowledge")
            theirs = meeting.verdicts[partner]
            hub.meetings.pop(key, None)
        if verdict.outcome is Outcome.MERGED and theirs.outcome is not Outcome.MERGED:
            return Verdict(Outcome.REFUSED, detail=f"the partner refused: {theirs.outcome} {theirs.detail}")
        return verdict

    def _wait(self, condition: object, deadline: float) -> bool:
        return self._hub.changed.wait_for(condition, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
