"""How much of a partner's contribution a peer takes: what a swap changes is bounded, whatever the partner sends.

A peer takes the mean own + share · (theirs − own). The share is the partner's by tokens, and at most a half, so a false
count of tokens gains nothing. It is smaller where a part would change too much:

    share · ‖theirs − own‖ ≤ ½ · reach        for each part, over the elements of that part

This is centred clipping (Karimireddy, He and Jaggi, "Learning from history for Byzantine robust optimization", ICML
2021) around the peer's own contribution: a false one may have any direction, but no larger effect than that of an
honest peer. The reach is ``CLIP`` times the usual distance, and at least 2 ‖βΔ‖: so far apart may two peers be that
began at the same weights and took inner steps of the same length. Usual is the median of the recent partners'
distances in units of this peer's own ‖βΔ‖, because both become smaller with the learning rate. After the last inner
step of a run there is no such unit, and the median is that of the distances themselves. A minority cannot move the
median, and no partner counts as further than ``FURTHEST``: what hostile peers stir up is not taken for usual.

Each side clips by what it has seen, so the two means of a pair may differ; NoLoCo does not need them to be equal. A
peer that was alone for long so takes much of the others, while they take a little of it at a time. Each part is clipped
by itself, because an overlapped swap uses the first parts before the last ones have come.

Only three kinds of contributions are refused, with their :class:`Reason`: what is not finite; what was merged before;
and what is far *and* has nothing in common with the peer's own, because a mean of two such models is a bad model
(swarm/healing.py). Replicas that trained alone for long still had a cosine of about 0.3.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from torch import Tensor

from peer.exchange.codec import BLOCK
from peer.rounds.contribution import square
from peer.rounds.types import Newest, Outcome, Reason, Verdict

CLIP = 1.5  # times the usual distance; with 2.0 two hostile peers of eight drive the others apart without limit
FURTHEST = 4.0  # times ‖βΔ‖: honest partners were up to 3.9 apart
LEFT_BY_ROUNDING = 1e-6  # times ‖s‖: a change that is not longer is what fp32 leaves between θ and φ, and no training
COMMON = 0.1  # least cosine of two contributions that have something in common
LEAST_SHARE, MOST_SHARE = 0.1, 0.5  # of a partner in a mean weighted by tokens
RECENT_PARTNERS = 15
KNOWN_PARTNERS = 256
ENOUGH = 0.125  # share of the elements that allows a judgement on all
MOST_UNRESOLVED = 0.1  # share of the blocks of a contribution that is merged
SAID_UNRESOLVED = 0.01  # share from which on a merged one says so; fewer change nothing that could be seen
SOME = ENOUGH / 2  # a partner may stop after ENOUGH; this peer has seen at least this share by then
REMEMBERED = 256  # merged contributions


def share(theirs: int, own: int) -> float:
    """The partner's share in a mean weighted by tokens; bounded, whatever its header claims."""
    total = theirs + own
    return min(max(theirs / total, LEAST_SHARE), MOST_SHARE) if total else MOST_SHARE


class Guard:
    """What a peer remembers of its partners. One swap at a time, from any thread."""

    def __init__(self) -> None:
        self._change = 0.0  # ‖βΔ‖ of this peer in its last swap with inner steps before it
        # by partner: ‖βΔ‖ of this peer then, and each part's distance in units of it
        self._partners = Newest[tuple[float, dict[int, float]]](RECENT_PARTNERS)
        self._known = Newest[bool](KNOWN_PARTNERS)  # partners whose last contribution was accepted
        # partner and digest of each payload that was merged; two newcomers with one donor may send the same
        self.merged: deque[tuple[str, bytes]] = deque(maxlen=REMEMBERED)

    def judgement(self, partner: str, numel: int) -> Judgement:
        """A swap of ``numel`` elements with ``partner`` (its id) begins."""
        return Judgement(self, partner, numel, known=partner in self._known)

    def reach(self, start: int, change: float) -> float:
        """How far a partner may be in the part that begins at element ``start``.

        ``change``: this peer's own ‖βΔ‖ of it. A newcomer without inner steps has none, and has met nobody: it knows no
        distance by which to judge, so it takes nothing at its first boundary.
        """
        met = self._partners.values()
        lengths = [change, *((self._change if change else then) * it.get(start, 0.0) for then, it in met)]
        return max(2 * change, CLIP * median_low(list(filter(None, lengths)) or [0.0]))

    def learn(self, judgement: Judgement) -> None:
        """A contribution has been judged, in part or whole, whatever the verdict."""
        self._known.pop(judgement.partner, None)
        if not judgement.change:  # before the first inner step, or after the last one: there is no unit
            return
        _, before = self._partners.pop(judgement.partner, (0.0, {}))
        if judgement.seen == judgement.numel:
            self._change = math.sqrt(judgement.change)
        if math.isfinite(judgement.apart) and self._change:
            unit = max(self._change, math.sqrt(judgement.apart) / FURTHEST)
            now = {start: it / unit for start, it in judgement.distances.items()}
            self._partners[judgement.partner] = self._change, before | now

    def remember(self, partner: str, digest: bytes) -> None:
        """A payload of ``partner`` was merged, after :meth:`learn`."""
        self._known[partner] = True
        self.merged.append((partner, digest))


@dataclass
class Judgement:
    """One partner's contribution, part by part. Sums of squares over the parts so far."""

    guard: Guard
    partner: str
    numel: int
    known: bool = True  # its last contribution was accepted
    share: float = MOST_SHARE  # the partner's in the mean, by tokens
    ahead: int = 0  # rounds that the partner is ahead, by its header
    seen: int = 0
    unresolved: int = 0  # blocks that the codec could not resolve
    whole: bool = False  # all parts have come, and there is no objection
    own: float = 0.0  # ‖s_own‖²
    theirs: float = 0.0  # ‖s_theirs‖²
    apart: float = 0.0  # ‖s_theirs − s_own‖²
    change: float = 0.0  # ‖βΔ_own‖²
    reach: float = 0.0  # (the guard's reach)²
    distances: dict[int, float] = field(default_factory=dict)  # ‖s_theirs − s_own‖ of each part, by its first element
    least: float = 1.0  # the smallest share of a part that was left after clipping, relative to ``share``

    def add(self, start: int, own: Tensor, change: Tensor, theirs: Tensor, unresolved: int = 0) -> float:
        """One more part (fp32, host), from element ``start``. ``change``: of ``own`` by this peer's inner steps, βΔ.
        ``unresolved``: how many blocks of ``theirs`` are ``own``, because the codec could not resolve them.

        Returns the partner's share in the mean of this part.
        """
        self.seen += own.numel()
        self.unresolved += unresolved
        length, apart, changed = square(own), square(theirs - own), square(change)
        if changed <= LEFT_BY_ROUNDING**2 * length:
            changed = 0.0  # the swap before may have opened this part after the last inner step
        self.own += length
        self.theirs += square(theirs)
        reach = self.guard.reach(start, math.sqrt(changed))
        self.apart += apart
        self.change += changed
        self.reach += reach**2
        distance = math.sqrt(apart)
        self.distances[start] = distance
        if self.share * distance <= MOST_SHARE * reach:
            return self.share
        clipped = MOST_SHARE * reach / distance
        self.least = min(self.least, clipped / self.share)
        return clipped

    def objection(self, digest: bytes) -> Verdict | None:
        """Why it must not be used, by the parts so far. ``digest``: of bytes that an honest peer never sends twice;
        empty before there are any.
        """
        if digest and (self.partner, digest) in self.guard.merged:
            return _poisoned(Reason.REPLAYED, "the partner sent what was merged before")
        if not math.isfinite(self.theirs):
            return _poisoned(Reason.NOT_FINITE, "the partner's contribution is not finite")
        if self.seen >= ENOUGH * self.numel and self.apart > self.reach and self.strange:
            apart, reach = math.sqrt(self.apart), math.sqrt(self.reach)
            detail = f"the partner is {apart:.4g} away, {reach:.4g} is its reach, and has nothing in common"
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
        self.whole = objection is None
        if self.whole and self.unresolved * BLOCK > MOST_UNRESOLVED * self.numel:
            return Verdict(Outcome.REFUSED, detail=self._unresolved_in_words, reason=Reason.UNRESOLVED)
        self.guard.learn(self)
        if objection is not None:
            return objection
        self.guard.remember(self.partner, digest)
        notes = [f"clipped to {self.least:.2g}"] if self.least < 1 else []
        notes += [self._unresolved_in_words] if self.unresolved * BLOCK > SAID_UNRESOLVED * self.numel else []
        resolved = max(0.0, 1 - self.unresolved * BLOCK / self.numel) * self.own  # the rest is further away, and not 0
        distance = math.sqrt(self.apart / resolved) if resolved else 0.0
        return Verdict(Outcome.MERGED, distance, ", ".join(notes))

    @property
    def _unresolved_in_words(self) -> str:
        return f"{self.unresolved} of {-(-self.numel // BLOCK)} blocks could not be resolved"


def _poisoned(reason: Reason, detail: str) -> Verdict:
    return Verdict(Outcome.POISONED, detail=detail, reason=reason)
