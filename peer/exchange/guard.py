"""The acceptance test that stands before every average of two: is this what a peer would send that trains the same run?

A peer knows what its own inner steps have done to its contribution s = γφ + βΔ (outer/noloco.py): that is βΔ. By it the
partner's contribution says what it would change,

    x = s_theirs − s_own + βΔ_own = βΔ_theirs + γ (φ_theirs − φ_own)

its own progress, and the way to where it stands. Refused is, each for its :class:`Reason`:

    not finite · a norm that is out of all proportion · x far longer than is usual · what was merged before

"Usual" is the median of one's own βΔ and of the last x of each recent partner, refused or not, so a minority cannot
move it. However unusual, x is not too long while the two contributions have something in common: of replicas that
trained by themselves for long their cosine was still about 0.3. A guard that refuses a peer that has been alone for
long would leave it alone for longer. (Two that have nothing in common at all: swarm/healing/divergence.py.) x may point
anywhere: honest ones do, and the harm of a false direction is bounded (README, "One hostile peer in eight").
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

import xxhash
from torch import Tensor

from peer.exchange.average import Verdict, square
from peer.rounds.contribution import Contribution
from peer.rounds.types import Outcome, Reason
from peer.rounds.vectors import parts, scratch

Key = TypeVar("Key")
Value = TypeVar("Value")

NORMS = 2.0  # ratio of two contributions' norms, either way
FAR = 2.0  # times the usual length of x
COMMON = 0.1  # cosine of two contributions that have something in common
RECENT_PARTNERS = 15
KNOWN_PARTNERS = 256
ENOUGH = 0.125  # share of the elements that tells something of all
SOME = ENOUGH / 2  # the partner may stop after ENOUGH; what this peer has seen by then is at least this share
EARLY = 5.0  # before ENOUGH has been seen, NORMS is so many times as large
REMEMBERED = 256  # merged contributions


class Guard:
    """What a peer knows of its partners from round to round. One swap at a time, from any thread."""

    def __init__(self, max_norm_ratio: float = NORMS) -> None:
        self.max_norm_ratio = max_norm_ratio
        self._change = 0.0  # ‖βΔ‖ of this peer in its last swap
        self._partners: OrderedDict[str, float] = OrderedDict()  # length of x by partner, newest last
        self._known: OrderedDict[str, None] = OrderedDict()  # partners whose last one was accepted, newest last
        self._payloads: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # partner and digest of what was merged

    def judgement(self, partner: str, numel: int) -> Judgement:
        """A swap with ``partner`` (its id) begins, of ``numel`` elements."""
        return Judgement(self, partner, numel, known=partner in self._known)

    def usual(self, change: float) -> float:
        """How long x is usually; ``change``: ‖βΔ‖ of now, as far as it is known."""
        lengths = [length for length in (self._change or change, *self._partners.values()) if length]
        return median_low(lengths) if lengths else 0.0

    def replayed(self, partner: str, digest: bytes) -> bool:
        """Was this of ``partner`` merged before? (Of another one it may: two newcomers with the same donor's state.)"""
        return (partner, digest) in self._payloads

    def learn(self, judgement: Judgement) -> None:
        """It is judged, perhaps by a part of it only; whatever the verdict."""
        self._known.pop(judgement.partner, None)
        if judgement.seen == judgement.numel:
            self._change = math.sqrt(judgement.change)
        if math.isfinite(judgement.length):
            _newest(self._partners, judgement.partner, math.sqrt(judgement.length), RECENT_PARTNERS)

    def remember(self, partner: str, digest: bytes) -> None:
        """A payload of ``partner`` was merged."""
        _newest(self._known, partner, None, KNOWN_PARTNERS)
        _newest(self._payloads, (partner, digest), None, REMEMBERED)


@dataclass
class Judgement:
    """One partner's contribution, part by part. Sums of squares over the parts so far."""

    guard: Guard
    partner: str
    numel: int
    known: bool = True  # it was met of late, and what it sent was accepted
    seen: int = 0
    own: float = 0.0  # ‖s_own‖²
    theirs: float = 0.0  # ‖s_theirs‖²
    apart: float = 0.0  # ‖s_theirs − s_own‖²
    change: float = 0.0  # ‖βΔ_own‖²
    length: float = 0.0  # ‖x‖²
    ahead: int = 0  # rounds that the partner says it is further

    def add(self, own: Tensor, change: Tensor, theirs: Tensor) -> None:
        """One part more; fp32, host."""
        self.seen += own.numel()
        self.own += square(own)
        self.theirs += square(theirs)
        implied = theirs - own
        self.apart += square(implied)
        implied.add_(change)
        self.length += square(implied)
        self.change += square(change)

    def objection(self, digest: bytes) -> tuple[Reason, str] | None:
        """Why theirs must not be used, by the parts so far. ``digest``: of something in it that never comes twice."""
        if self.guard.replayed(self.partner, digest):
            return Reason.REPLAYED, "the partner sent what was merged before"
        if not math.isfinite(self.theirs):
            return Reason.NOT_FINITE, "the partner's contribution is not finite"
        enough = self.seen >= ENOUGH * self.numel
        own, theirs = math.sqrt(self.own), math.sqrt(self.theirs)
        ratio = self.guard.max_norm_ratio * (1.0 if enough else EARLY)
        if not own / ratio <= theirs <= own * ratio:
            return Reason.NORM, f"the partner's norm {theirs:.4g} is not within a factor {ratio:g} of {own:.4g}"
        length, usual = math.sqrt(self.length), self.guard.usual(math.sqrt(self.change))
        if enough and length > FAR * usual and self.strange:
            return Reason.FAR, f"the partner would change {length:.4g}, {usual:.4g} is usual, and has nothing in common"
        return None

    @property
    def usable(self) -> bool:
        """May parts to which there is no objection be used before all have come?"""
        return self.known or self.seen >= ENOUGH * self.numel

    @property
    def strange(self) -> bool:
        """The two contributions have nothing in common, by the parts so far."""
        product = (self.own + self.theirs - self.apart) / 2
        return self.seen >= SOME * self.numel and product < COMMON * math.sqrt(self.own) * math.sqrt(self.theirs)

    def verdict(self, digest: bytes) -> Verdict:
        """All has come. ``digest`` as above."""
        objection = self.objection(digest)
        self.guard.learn(self)
        if objection is not None:
            reason, detail = objection
            return Verdict(Outcome.POISONED, detail=detail, reason=reason)
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


def _newest(kept: OrderedDict[Key, Value], key: Key, value: Value, count: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > count:
        kept.popitem(last=False)
