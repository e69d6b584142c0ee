"""The acceptance test before every average of two: is this what a peer of the same run would send?

A peer knows how its own inner steps changed its contribution s = γφ + βΔ (outer/noloco.py): by βΔ. So it can compute
what the partner's contribution would change:

    x = s_theirs − s_own + βΔ_own = βΔ_theirs + γ (φ_theirs − φ_own)

the partner's progress and the difference of the slow weights. A contribution is refused, with its :class:`Reason`, when

    it is not finite · its norm is out of proportion · x is far longer than usual · it was merged before

"Usual" is the median of this peer's own βΔ and of each recent partner's last x, also of those refused, so a minority
cannot move it. A long x is accepted while the two contributions have something in common: replicas that trained alone
for long still had a cosine of about 0.3, and a refusal would keep them apart for longer. (Two with nothing in common:
swarm/healing.py.) The direction of x is free: honest ones differ, and the harm of a false one is bounded
(tests/benchmarks/README.md, "One hostile peer in eight").
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median_low

import xxhash
from torch import Tensor

from peer.exchange.average import Verdict, square
from peer.rounds.contribution import Contribution, parts, scratch
from peer.rounds.types import Outcome, Reason

NORMS = 2.0  # largest ratio of two contributions' norms
FAR = 2.0  # times the usual length of x
COMMON = 0.1  # least cosine of two contributions that have something in common
RECENT_PARTNERS = 15
KNOWN_PARTNERS = 256
ENOUGH = 0.125  # share of the elements that allows a judgement on all
SOME = ENOUGH / 2  # a partner may stop after ENOUGH; this peer has seen at least this share by then
EARLY = 5.0  # factor on NORMS before ENOUGH has been seen
REMEMBERED = 256  # merged contributions


class Guard:
    """What a peer remembers of its partners. One swap at a time, from any thread."""

    def __init__(self, max_norm_ratio: float = NORMS) -> None:
        self.max_norm_ratio = max_norm_ratio
        self._change = 0.0  # ‖βΔ‖ of this peer in its last swap
        self._partners: dict[str, float] = {}  # length of the last x by partner, newest last
        self._known: deque[str] = deque(maxlen=KNOWN_PARTNERS)  # partners whose last contribution was accepted
        # partner and digest of each payload that was merged; two newcomers with one donor may send the same
        self.merged: deque[tuple[str, bytes]] = deque(maxlen=REMEMBERED)

    def judgement(self, partner: str, numel: int) -> Judgement:
        """A swap of ``numel`` elements with ``partner`` (its id) begins."""
        return Judgement(self, partner, numel, known=partner in self._known)

    def usual(self, change: float) -> float:
        """The usual length of x; ``change``: the present ‖βΔ‖ over the parts so far."""
        lengths = list(filter(None, (self._change or change, *self._partners.values())))
        return median_low(lengths) if lengths else 0.0

    def learn(self, judgement: Judgement) -> None:
        """A contribution has been judged, in part or whole, whatever the verdict."""
        if judgement.partner in self._known:
            self._known.remove(judgement.partner)
        if judgement.seen == judgement.numel:
            self._change = math.sqrt(judgement.change)
        if math.isfinite(judgement.length):
            self._partners.pop(judgement.partner, None)
            self._partners[judgement.partner] = math.sqrt(judgement.length)
            if len(self._partners) > RECENT_PARTNERS:
                del self._partners[next(iter(self._partners))]

    def remember(self, partner: str, digest: bytes) -> None:
        """A payload of ``partner`` was merged, after :meth:`learn`."""
        self._known.append(partner)
        self.merged.append((partner, digest))


@dataclass
class Judgement:
    """One partner's contribution, part by part. Sums of squares over the parts so far."""

    guard: Guard
    partner: str
    numel: int
    known: bool = True  # its last contribution was accepted
    seen: int = 0
    own: float = 0.0  # ‖s_own‖²
    theirs: float = 0.0  # ‖s_theirs‖²
    apart: float = 0.0  # ‖s_theirs − s_own‖²
    change: float = 0.0  # ‖βΔ_own‖²
    length: float = 0.0  # ‖x‖²
    ahead: int = 0  # rounds that the partner is ahead, by its header

    def add(self, own: Tensor, change: Tensor, theirs: Tensor) -> None:
        """One more part; fp32, host."""
        self.seen += own.numel()
        self.own += square(own)
        self.theirs += square(theirs)
        implied = theirs - own
        self.apart += square(implied)
        implied.add_(change)
        self.length += square(implied)
        self.change += square(change)

    def objection(self, digest: bytes) -> Verdict | None:
        """Why it must not be used, by the parts so far. ``digest``: of bytes that an honest peer never sends twice."""
        if (self.partner, digest) in self.guard.merged:
            return _poisoned(Reason.REPLAYED, "the partner sent what was merged before")
        if not math.isfinite(self.theirs):
            return _poisoned(Reason.NOT_FINITE, "the partner's contribution is not finite")
        enough = self.seen >= ENOUGH * self.numel
        own, theirs = math.sqrt(self.own), math.sqrt(self.theirs)
        ratio = self.guard.max_norm_ratio * (1.0 if enough else EARLY)
        if not own / ratio <= theirs <= own * ratio:
            detail = f"the partner's norm {theirs:.4g} is not within a factor {ratio:g} of {own:.4g}"
            return _poisoned(Reason.NORM, detail)
        length, usual = math.sqrt(self.length), self.guard.usual(math.sqrt(self.change))
        if enough and length > FAR * usual and self.strange:
            detail = f"the partner would change {length:.4g}, {usual:.4g} is usual, and has nothing in common"
            return _poisoned(Reason.FAR, detail)
        return None

    @property
    def usable(self) -> bool:
        """May parts without an objection be used before all have come?"""
        return self.known or self.seen >= ENOUGH * self.numel

    @property
    def strange(self) -> bool:
        """The two contributions have nothing in common, by the parts so far."""
        product = (self.own + self.theirs - self.apart) / 2
        return self.seen >= SOME * self.numel and product < COMMON * math.sqrt(self.own) * math.sqrt(self.theirs)

    def verdict(self, digest: bytes) -> Verdict:
        """All parts have come. ``digest``: as for :meth:`objection`."""
        objection = self.objection(digest)
        self.guard.learn(self)
        if objection is not None:
            return objection
        self.guard.remember(self.partner, digest)
        return Verdict(Outcome.MERGED, distance=math.sqrt(self.apart / self.own) if self.own else 0.0)


def judge(own: Contribution, theirs: Tensor, guard: Guard, partner: str) -> Verdict:
    """The verdict on ``theirs``, flat fp32 on the host, all at once."""
    judgement, digest = guard.judgement(partner, own.numel), xxhash.xxh3_128()
    room, room_of_change = scratch(own.numel), scratch(own.numel)
    for start, stop in parts(own.numel):
        part, change = room[: stop - start], room_of_change[: stop - start]
        own.read_both(start, part, change)
        judgement.add(part, change, theirs[start:stop])
        digest.update(theirs[start:stop].numpy().data)
    return judgement.verdict(digest.digest())


def _poisoned(reason: Reason, detail: str) -> Verdict:
    return Verdict(Outcome.POISONED, detail=detail, reason=reason)
