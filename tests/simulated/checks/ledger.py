"""What every swap put in and what came out of it: checks each merge against what both had sent.

The checks use nothing of the exchange's own arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK
from peer.exchange.group.feedback import round_mean
from peer.exchange.group.rounding import Rounding
from peer.exchange.guard import RECENT_PARTNERS
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Outcome
from tests.simulated.checks.sparse import elements, senders_mean
from tests.simulated.peer import SimulatedPeer

EXACT = {"none": 2e-6, "fp16": 1e-3, "bf16": 8e-3}  # of the largest element
STEPS = {"int8": 1 / 120, "int4": 1 / 6.9, "int2": 1.0}  # of a group's codec: a step of a block, of its largest element
LEAST_SHARE, MOST_SHARE = 0.1, 0.5  # of a partner in a mean of two
LONGEST_REACH = 6.0  # times a peer's own change: so far away is nobody whose contribution is merged in full
NEAR = 1.9  # times as far away as a peer's own inner steps went: merged in full
LEAST_COMMON = 0.05  # cosine of two contributions that are merged
GROUP_CLIP = 1.5
SETTLED = 5  # rounds after which a peer's own changes are small, and so are those that it accepts


@dataclass
class Side:
    """One peer's part of a swap; ``parts``: by their first element; ``steps``: of their rounding.

    ``taken``: the share that its guard gave the partner in each part, and the norm of its own change. ``accepted``: it
    has verified and accepted all that its partner sent.
    """

    tokens: int
    round: int
    parts: dict[int, Tensor] = field(default_factory=dict)
    steps: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, tuple[float, float]] = field(default_factory=dict)
    accepted: bool = False

    def whole(self) -> Tensor:
        return torch.cat([self.parts[start] for start in sorted(self.parts)])


@dataclass
class GroupSide:
    """One member's part of a group's round. ``kept``: by rounding, of before; ``done``: it has a result."""

    own: Tensor
    lineage: str
    kept: Tensor | None
    done: bool = False
    outcome: Outcome | None = None


@dataclass
class Ledger:
    """``violation``: is called with a sentence. ``merged``: merges, once for each peer that took part."""

    violation: Callable[[str], None]
    say: Callable[[SimulatedPeer, str], None]
    outcomes: Counter[str] = field(default_factory=Counter)
    merged: int = 0
    _sides: dict[int, dict[str, Side]] = field(default_factory=dict)  # by number of the stream and peer id
    _groups: dict[str, dict[str, GroupSide]] = field(default_factory=dict)  # by token and peer id
    _merged: set[tuple[str, str, bytes]] = field(default_factory=set)  # by whom, of whom, the digest
    # by name: how far its inner steps went before its last swaps
    _stepped: defaultdict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=RECENT_PARTNERS))
    )
    _digests: dict[str, str] = field(default_factory=dict)  # of the result, by token
    _means: dict[str, Tensor] = field(default_factory=dict)  # of what a group has put in, by token

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
            if averaged.outcome is Outcome.MERGED and not averaged.partners:
                self.violation(f"{peer.name} merged with nobody")
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
                    self._check_verdicts(peer, mine, theirs, averaged)
            elif not torch.equal(averaged.mean, own):
                self.violation(f"{peer.name} uses something else than its own part after a swap that failed")
            return averaged

        exchange.average = watched

    def _watch_parts(self, peer: SimulatedPeer, exchange: Any) -> None:  # noqa: C901
        start, current = exchange.start, dict[str, Side]()
        self._watch_codec(peer, exchange, lambda: current.get("swap"))

        def watched(meet: Callable[[], Group]) -> Any:
            swap: dict[str, Any] = {}

            def met() -> Group:
                group = meet()
                if group.links:
                    swap["sides"], swap["partner"] = self._of(group), group.links[0].peer_id
                    swap["sides"][peer.host.peer_id] = current["swap"] = Side(group.tokens, group.round)
                return group

            mailbox = start(met)
            put, add, finish = mailbox.put, mailbox.add_correction, mailbox.finish

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

            def finished(result: Any) -> None:
                theirs = swap["sides"].get(swap["partner"]) if swap else None
                if theirs is not None and isinstance(result, Averaged) and result.outcome is Outcome.MERGED:
                    self._check_verdicts(peer, swap["sides"][peer.host.peer_id], theirs, result)
                    if mailbox._opened:
                        self.violation(f"{peer.name} keeps parts of a swap that has ended")
                finish(result)

            mailbox.put, mailbox.add_correction, mailbox.finish = noted, checked, finished
            return mailbox

        exchange.start = watched

    def _of(self, group: Group) -> dict[str, Side]:
        stream: Any = group.links[0].stream
        return self._sides.setdefault(stream.writer.pipe.number, {})

    def _check_verdicts(self, peer: SimulatedPeer, own: Side, theirs: Side, averaged: Averaged) -> None:
        """After a merge: its partner agrees to it, and what it put in was plausible and new."""
        if not theirs.accepted:
            self.violation(f"{peer.name} merged, and its partner has not accepted its part")
        if peer.lie or not theirs.parts:
            return
        sent, mine = theirs.whole(), own.whole()
        if not torch.isfinite(sent).all():
            self.violation(f"{peer.name} merged what is not finite")
        share = share_of(own, theirs)
        full = any(taken >= share for taken, _ in own.taken.values())
        stepped = math.hypot(*(changed for _, changed in own.taken.values()))
        before = self._stepped[peer.name]
        if stepped:
            before.append(stepped)
            stepped = max(list(before)[-2:])  # the last phases of a run are shorter and shorter
        else:  # after the last inner step partners may be as far away as they were
            stepped = max(before, default=0.0)
        reach = LONGEST_REACH * stepped * MOST_SHARE / share  # of few tokens a mean takes less
        if full and float(sent.norm()) > 1.01 * (float(mine.norm()) + reach):
            self.violation(f"{peer.name} merged in full what is out of proportion")
        if own.round > SETTLED and float(sent @ mine) < LEAST_COMMON * float(sent.norm() * mine.norm()):
            self.violation(f"{peer.name} merged what has nothing in common with its own")
        key = (f"{peer.name} {peer.lives}", averaged.partner_id, hashlib.sha1(sent.numpy().tobytes()).digest())
        if key in self._merged:
            self.violation(f"{peer.name} merged the same contribution twice")
        self._merged.add(key)

    def _compare(self, peer: SimulatedPeer, own: Side, theirs: Side, first: int, change: Tensor) -> None:
        """``change``: of the mean against this peer's own part."""
        if peer.lie:
            return
        share, changed = own.taken[first]
        apart = theirs.parts[first] - own.parts[first]
        if not 0 <= share <= share_of(own, theirs):
            self.violation(f"{peer.name} takes a share of {share:.3g} of its partner")
        # by what has arrived: int4 rounds so coarsely that what it decodes is further away
        if share < share_of(own, theirs) and float(change.norm()) < share * NEAR * changed:
            self.violation(f"{peer.name} clips what is near")
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
        codec, encode = exchange.codec, exchange.codec.encode
        guard, remember = exchange.guard, exchange.guard.remember

        def accepted(partner: str, digest: bytes) -> None:
            side = current()
            if side is not None:
                side.accepted = True
            remember(partner, digest)

        guard.remember = accepted
        judgement = guard.judgement

        def begun(partner: str, numel: int) -> Any:
            found = judgement(partner, numel)
            add = found.add

            def weighed(start: int, own: Tensor, change: Tensor, theirs: Tensor, unresolved: int = 0) -> float:
                share: float = add(start, own, change, theirs, unresolved)
                side = current()
                if side is not None:
                    side.taken[start] = share, float(change.norm())
                return share

            found.add = weighed
            return found

        guard.judgement = begun

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
        assert peer.trainer is not None
        average, digest, counters = exchange.average, exchange._digest, peer.trainer.counters
        equal = peer.trainer.boundary.outer.equal_replicas
        current = dict[str, GroupSide]()

        def watched(contribution: Any, group: Group) -> Averaged:
            current.clear()
            if group.assembly is None:
                return average(contribution, group)
            own, kept = elements(contribution), getattr(exchange, "kept", None)
            kept = None if kept is None else kept.clone()
            put_in = self._groups.setdefault(group.assembly.token, {})
            lineage = counters.lineage.digest if equal else ""
            put_in[peer.host.peer_id] = current["side"] = GroupSide(own, lineage, kept)
            averaged: Averaged = average(contribution, group)
            current["side"].outcome = averaged.outcome
            leader = put_in.get(group.assembly.seats[0].peer_id)
            ends = {it.outcome for it in put_in.values()}
            if leader is not None and leader.outcome not in (None, Outcome.MERGED) and Outcome.MERGED in ends:
                self.violation(f"{peer.name} is in a group in which somebody merged, and not the leader")
            if averaged.outcome is Outcome.MERGED:
                self._check_group(peer, group, averaged, put_in)
            elif kept is not None and not torch.equal(exchange.kept, kept):
                self.violation(f"{peer.name} keeps something else after a round that failed")
            elif not torch.equal(averaged.mean, own.nan_to_num()):
                self.violation(f"{peer.name} uses something else than its own part after a round that failed")
            return averaged

        def noted() -> str:
            if current:
                current["side"].done = True
            return str(digest())

        exchange.average, exchange._digest = watched, noted

    def _check_group(self, peer: SimulatedPeer, group: Group, averaged: Averaged, put_in: dict[str, GroupSide]) -> None:
        assert group.assembly is not None
        token, seats = group.assembly.token, group.assembly.seats
        missing = [seat.name for seat in seats if seat.peer_id not in put_in]
        if missing:
            self.violation(f"{peer.name} merged a group in which {', '.join(missing)} put nothing in")
            return
        if any(not put_in[seat.peer_id].done for seat in seats):
            self.violation(f"{peer.name} merged, and a member of its group has no result")
        if len({put_in[seat.peer_id].lineage for seat in seats}) > 1:
            self.violation(f"{peer.name} merged with members of another lineage")
        codec = peer.config.run.exchange.codec
        if token not in self._means:
            sides = [put_in[seat.peer_id] for seat in seats]
            own, kept = [it.own for it in sides], [it.kept for it in sides]
            sparse = peer.config.run.outer.name == "decoupled"
            self._means = {token: senders_mean(own, GROUP_CLIP) if sparse else group_mean(own, codec, kept)}
        mean = self._means[token]
        worst, largest = float((averaged.mean - mean).abs().max()), float(mean.abs().max())
        if worst > EXACT["none"] * (largest + 1e-9) * 4 + STEPS.get(codec, 0.0) * largest:
            self.violation(f"{peer.name} merged what is not its group's mean: off by {worst:.3g}")
        if self._digests.setdefault(token, averaged.digest) != averaged.digest:
            self.violation(f"{peer.name} merged another result than the rest of its group")


def group_mean(
    group: Sequence[Tensor], codec: CodecName = "none", kept: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Slice by slice; of three and more, no part of a slice is longer than ``GROUP_CLIP`` times the median one. Up to a
    step of the codec, as a sum in another order may be rounded to the next one. ``kept``: by rounding, of before.
    """
    cuts = [len(group[0]) * n // len(group) for n in range(1, len(group))]
    slices, owed = torch.stack(list(group)).tensor_split(cuts, 1), kept or [None] * len(group)
    means = []
    for place, part in enumerate(slices):
        own = [None if it is None else it.tensor_split(cuts)[place] for it in owed]
        for member, row in enumerate(part):
            if member != place:  # its own contribution is not sent
                row += 0.0 if (mine := own[member]) is None else mine
                Rounding(codec).apply(row)
        norms = part.norm(dim=1)
        reach = GROUP_CLIP * median(norms.tolist()) if len(group) > 2 else 0.0
        part = part * (reach / norms).clamp(max=1)[:, None] if reach else part
        means.append(part.mean(0))
        round_mean(means[-1], own[place], part.norm(dim=1).tolist(), Rounding(codec))
    return torch.cat(means)


def share_of(own: Side, theirs: Side) -> float:
    """The partner's share in a mean, by the tokens of both, before anything is clipped."""
    total = own.tokens + theirs.tokens
    return min(max(theirs.tokens / total, LEAST_SHARE), MOST_SHARE) if total else MOST_SHARE
