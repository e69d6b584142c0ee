"""What every swap put in and what came out of it: checks each merge against what both had sent.

The checks use nothing of the exchange's own arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peer.exchange.codec import BLOCK
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Outcome
from tests.simulated.peer import SimulatedPeer

EXACT = {"none": 2e-6, "fp16": 1e-3, "bf16": 8e-3}  # of the largest element
LEAST_SHARE = 0.1  # of a peer in a mean of two


@dataclass
class Side:
    """One peer's part of a swap; ``parts``: by their first element; ``steps``: of their rounding."""

    tokens: int
    round: int
    parts: dict[int, Tensor] = field(default_factory=dict)
    steps: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Ledger:
    """``violation``: is called with a sentence. ``merged``: merges, once for each peer that took part."""

    violation: Callable[[str], None]
    say: Callable[[SimulatedPeer, str], None]
    outcomes: Counter[str] = field(default_factory=Counter)
    merged: int = 0
    _sides: dict[int, dict[str, Side]] = field(default_factory=dict)  # by number of the stream and peer id
    _groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by token and peer id
    _digests: dict[str, str] = field(default_factory=dict)  # of the result, by token

    def watch(self, peer: SimulatedPeer) -> None:
        """Note what this peer's exchange does from now on."""
        assert peer.trainer is not None
        boundary: Any = peer.trainer.boundary
        exchange = boundary.exchange
        if isinstance(exchange, OverlappedPairExchange):
            self._watch_parts(peer, exchange)
        elif isinstance(exchange, PairExchange):
            self._watch_pair(peer, exchange)
        else:
            self._watch_group(peer, exchange)
        ended = boundary.presence.ended

        def noted(averaged: Averaged) -> None:
            self.outcomes[averaged.outcome] += 1
            self.merged += averaged.outcome is Outcome.MERGED
            detail = f" ({averaged.detail})" if averaged.detail else ""
            self.say(peer, f"{averaged.outcome} with {', '.join(averaged.partners) or 'nobody'}{detail}")
            ended(averaged)

        boundary.presence.ended = noted

    # -- pairs

    def _watch_pair(self, peer: SimulatedPeer, exchange: Any) -> None:
        average, current = exchange.average, dict[str, Side]()
        self._watch_codec(peer, exchange, lambda: current.get("swap"))

        def watched(contribution: Any, group: Group) -> Averaged:
            if not group.links:
                return average(contribution, group)
            own = torch.empty(contribution.numel)
            contribution.read(0, own)
            sides = self._of(group)
            sides[peer.host.peer_id] = mine = Side(group.tokens, group.round, {0: own})
            current["swap"] = mine
            averaged: Averaged = average(contribution, group)
            if averaged.outcome is Outcome.MERGED:
                theirs = sides.get(averaged.partner_id)
                if theirs is None:
                    self.violation(f"{peer.name} merged with a peer that has put nothing in")
                else:
                    self._compare(peer, mine, theirs, 0, averaged.mean - own)
            return averaged

        exchange.average = watched

    def _watch_parts(self, peer: SimulatedPeer, exchange: Any) -> None:
        start, current = exchange.start, dict[str, Side]()
        self._watch_codec(peer, exchange, lambda: current.get("swap"))

        def watched(pace: float, meet: Callable[[], Group]) -> Any:
            swap: dict[str, Any] = {}

            def met() -> Group:
                group = meet()
                if group.links:
                    swap["sides"], swap["partner"] = self._of(group), group.links[0].peer_id
                    swap["sides"][peer.host.peer_id] = current["swap"] = Side(group.tokens, group.round)
                return group

            mailbox = start(pace, met)
            put, add = mailbox.put, mailbox.add_correction

            def noted(index: int, part: Any) -> None:
                if swap:
                    swap["sides"][peer.host.peer_id].parts[mailbox.parts[index][0]] = part.own.clone()
                put(index, part)

            def checked(index: int, correction: Tensor, *, usable: bool = True) -> None:
                theirs, first = swap["sides"].get(swap["partner"]), mailbox.parts[index][0]
                if theirs is None or first not in theirs.parts:
                    self.violation(f"{peer.name} corrects part {index} by one that its partner has not opened")
                else:
                    self._compare(peer, swap["sides"][peer.host.peer_id], theirs, first, correction)
                add(index, correction, usable=usable)

            mailbox.put, mailbox.add_correction = noted, checked
            return mailbox

        exchange.start = watched

    def _of(self, group: Group) -> dict[str, Side]:
        stream: Any = group.links[0].stream
        return self._sides.setdefault(stream.writer.pipe.number, {})

    def _compare(self, peer: SimulatedPeer, own: Side, theirs: Side, first: int, change: Tensor) -> None:
        """``change``: of the mean against this peer's own part."""
        if peer.lie:
            return
        total = own.tokens + theirs.tokens
        share = min(max(theirs.tokens / total, LEAST_SHARE), 1 - LEAST_SHARE) if total else 0.5
        apart = theirs.parts[first] - own.parts[first]
        if first in theirs.steps:
            rounding = theirs.steps[first] / 2
        else:
            codec = peer.config.run.exchange.codec
            rounding = EXACT[codec if codec in EXACT else "fp16"] * theirs.parts[first].abs().max() + 1e-9
        off = (change - share * apart).abs()
        limit = share * rounding * 1.01 + EXACT["none"] * (1 + own.parts[first].abs())
        wrong = off > limit
        if first in theirs.steps:
            wrong &= change != 0  # a block that does not resolve is left as it was
        if wrong.any():
            self.violation(f"{peer.name} merged what is not the mean: off by {float(off.max()):.3g}")

    def _watch_codec(self, peer: SimulatedPeer, exchange: Any, current: Callable[[], Side | None]) -> None:
        """Read the steps of what a modulo codec sends: the first two bytes of each block."""
        codec, encode = exchange._codec, exchange._codec.encode

        def noted(start: int, part: Tensor) -> bytes:
            data: bytes = encode(start, part)
            side = current()
            if side is not None and peer.lie:
                side.parts[start] = torch.frombuffer(bytearray(data), dtype=torch.float32)  # what it really sent
            elif side is not None and codec.sends in ("int8", "int4"):
                blocks = -(-part.numel() // BLOCK)
                rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(blocks, -1)
                step = rows[:, :2].flatten().view(torch.bfloat16).float()
                side.steps[start] = step.repeat_interleave(BLOCK)[: part.numel()]
            return data

        codec.encode = noted

    # -- groups

    def _watch_group(self, peer: SimulatedPeer, exchange: Any) -> None:
        average = exchange.average

        def watched(contribution: Any, group: Group) -> Averaged:
            if group.assembly is None:
                return average(contribution, group)
            own = torch.empty(contribution.numel)
            contribution.read(0, own)
            put_in = self._groups.setdefault(group.assembly.token, {})
            put_in[peer.host.peer_id] = own
            averaged: Averaged = average(contribution, group)
            if averaged.outcome is Outcome.MERGED:
                self._check_group(peer, group, averaged, put_in)
            return averaged

        exchange.average = watched

    def _check_group(self, peer: SimulatedPeer, group: Group, averaged: Averaged, put_in: dict[str, Tensor]) -> None:
        assert group.assembly is not None
        token, seats = group.assembly.token, group.assembly.seats
        missing = [seat.name for seat in seats if seat.peer_id not in put_in]
        if missing:
            self.violation(f"{peer.name} merged a group in which {', '.join(missing)} put nothing in")
            return
        mean = torch.stack([put_in[seat.peer_id] for seat in seats]).mean(0)
        worst = float((averaged.mean - mean).abs().max())
        if worst > EXACT["none"] * float(mean.abs().max() + 1e-9) * 4:
            self.violation(f"{peer.name} merged what is not its group's mean: off by {worst:.3g}")
        if self._digests.setdefault(token, averaged.digest) != averaged.digest:
            self.violation(f"{peer.name} merged another result than the rest of its group")
