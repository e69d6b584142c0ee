"""Exchanges in one process: the mean of a group, and the swap of a pair, blocking or overlapped with inner steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from peer.commands.simulate.replica import Replica
from peer.config.schema import CodecName
from peer.exchange.codec import COEFFICIENT_BYTES, Codec, prepare, size
from peer.exchange.group.feedback import mean_of_slices
from peer.exchange.group.rounding import Rounding
from peer.exchange.guard import Judgement, share
from peer.exchange.pair.mailbox import overlapped_parts
from peer.rounds.contribution import Contribution, SparseContribution, blend, mean_of_senders, parts
from peer.rounds.types import Outcome, Reason, Verdict

MERGED = Verdict(Outcome.MERGED)


def average(group: Sequence[Replica], codec: CodecName = "none") -> tuple[Tensor, int]:
    """The mean that every member of ``group`` gets, flat fp32, and the bytes that each member sends and receives.

    ``codec``: of dense contributions of more than one. The bytes leave out digests and headers of about 300 bytes.
    """
    contributions = [replica.state.outer.contribution() for replica in group]
    out, others = torch.empty(contributions[0].numel), len(group) - 1
    sparse = [it for it in contributions if isinstance(it, SparseContribution)]
    if sparse:
        mean_of_senders(sparse, out)
        return out, others * COEFFICIENT_BYTES * sparse[0].values.numel()
    rounding = Rounding(codec if others else "none")
    kept = [replica.state.kept if others else None for replica in group]
    mean_of_slices([it for it in contributions if not isinstance(it, SparseContribution)], rounding, out, kept)
    return out, round(2 * others / len(group) * rounding.size(out.numel()))


def swap(one: Replica, two: Replica) -> tuple[tuple[Tensor, Tensor], tuple[Verdict, Verdict]]:
    """A blocking swap: the mean, flat fp32, and the verdict of each replica. Means count when both have merged."""
    own, other = one.pairwise.contribution(), two.pairwise.contribution()
    for replica, contribution in ((one, own), (two, other)):
        prepare(replica.codec, contribution)
    introduce(one.codec, two.codec)
    sent = sum(size(one.codec.sends, stop - start) for start, stop in parts(own.numel))
    judgements = judgement(one, two), judgement(two, one)
    mean, verdict = _received(one.codec, own, two.codec, other, judgements[0])
    other_mean, other_verdict = _received(two.codec, other, one.codec, own, judgements[1])
    verdicts = verdict, other_verdict
    merged = both_merged(verdicts)
    for replica, judged in zip((one, two), judgements, strict=True):
        replica.codec.end_round(merged, whole=judged.whole)
        replica.bytes_sent += sent
        replica.bytes_received += sent
    return (mean, other_mean), verdicts


def judgement(me: Replica, other: Replica) -> Judgement:
    found = me.guard.judgement(other.name, me.state.outer.slow.numel)
    found.share = share(other.tokens, me.tokens)
    return found


def both_merged(verdicts: tuple[Verdict, Verdict]) -> bool:
    return all(verdict.outcome is Outcome.MERGED for verdict in verdicts)


def introduce(one: Codec, two: Codec) -> None:
    """Tell each codec what the other expects, as the headers of a swap do."""
    expect = one.expects, two.expects
    one.meet(expect[1])
    two.meet(expect[0])


def _received(
    codec: Codec, own: Contribution, sender: Codec, theirs: Contribution, judgement: Judgement
) -> tuple[Tensor, Verdict]:
    """The mean of ``own`` and the sender's ``theirs`` after coding, and the verdict, at a receiver with ``codec``."""
    out, digest = torch.empty(own.numel), xxhash.xxh3_128()
    for start, stop in parts(own.numel):
        mine, trained, part, change = (torch.empty(stop - start) for _ in range(4))
        own.read_both(start, mine, trained)
        theirs.read_both(start, part, change)
        data, mean = bytearray(sender.encode_changed(start, part, change)), out[start:stop]
        unresolved = codec.decode(sender.sends, start, data, mine, mean)
        digest.update(mean.numpy().data)
        blend(mine, mean, judgement.add(start, mine, trained, mean, unresolved))
    return out, judgement.verdict(digest.digest())


@dataclass
class _Side:
    """One replica's half of an overlapped swap."""

    replica: Replica
    judgement: Judgement
    learns: bool  # the codec needs what was trained
    verdict: Verdict = MERGED
    digest: bytes = b""  # of the first part that arrived
    held: list[tuple[int, Tensor]] = field(default_factory=list)  # corrections that may not be used yet
    used: list[tuple[int, Tensor]] = field(default_factory=list)

    def open(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The outer step of a part with its own contribution alone; returns that contribution and what was trained."""
        own, change = torch.empty(stop - start), torch.empty(stop - start)
        method = self.replica.pairwise
        fetched = method.slow.fetch(start, stop)
        fetched.arrived(wait=True)
        method.open(fetched, own, change)
        if self.learns:
            self.replica.codec.learn(start, change)
        return own, change

    def take(self, start: int, own: Tensor, change: Tensor, sender: CodecName, data: bytes) -> Tensor:
        """Judge the partner's part; returns the correction that it makes."""
        theirs = torch.empty_like(own)
        unresolved = self.replica.codec.decode(sender, start, bytearray(data), own, theirs)
        self.replica.bytes_received += len(data)
        self.digest = self.digest or xxhash.xxh3_128_digest(data)
        share = self.judgement.add(start, own, change, theirs, unresolved)
        objection = self.judgement.objection(self.digest)
        if objection is not None:
            self.replica.guard.learn(self.judgement)
            self.verdict = objection
        return theirs.sub_(own).mul_(share)

    def train(self) -> None:
        """An inner step. The swap ends when the corrections so far have been undone for it."""
        self.replica.train(1)
        if self.replica.harm:
            self.verdict = Verdict(Outcome.POISONED, detail=self.replica.harm, reason=Reason.HARMFUL)
            self.replica.harm = ""

    def amend(self, start: int, correction: Tensor) -> None:
        if self.verdict.reason is Reason.HARMFUL:
            return
        self.held.append((start, correction))
        if self.judgement.usable:
            for place, held in self.held:
                self.replica.pairwise.amend(place, held)
                self.used.append((place, held))
            self.held.clear()


class OverlappedSwap:
    """Opens a group of parts between two inner steps, and amends it one step later. ``steps``: inner steps that the
    transfer takes; the thread that calls :meth:`run` first makes those of both replicas.
    """

    def __init__(self, one: Replica, two: Replica, steps: int) -> None:
        self.one, self.two, self.steps = one, two, steps
        self.verdicts = MERGED, MERGED
        self._judgements = judgement(one, two), judgement(two, one)
        self._lock, self._done = threading.Lock(), False

    def run(self) -> None:
        with self._lock:
            if not self._done:
                self._swap()
            self._done = True

    def _swap(self) -> None:
        numel = self.one.state.outer.slow.numel
        pair = (self.one, self.two)
        for replica in pair:
            replica.judge()
        sides = [_Side(me, found, me.codec.begin()) for me, found in zip(pair, self._judgements, strict=True)]
        introduce(*(me.codec for me in pair))
        for side in sides:
            side.replica.try_merge(side.used)
        # at the end of a run a phase is shorter than the swap: as in the peer, nothing is trained during the swap
        overlap = self.steps if min(replica.target - replica.state.inner.step for replica in pair) > self.steps else 0
        borders, groups = overlapped_parts(numel), max(1, overlap)
        late: list[tuple[int, list[Tensor]]] = []
        for group in range(groups):
            _amend(sides, late)
            late = [(start, _swap_part(sides, start, stop)) for start, stop in borders[group::groups]]
            if overlap:
                for side in sides:
                    side.train()
        _amend(sides, late)
        self._end(sides)

    def _end(self, sides: list[_Side]) -> None:
        if all(side.verdict is MERGED for side in sides):
            for side in sides:
                side.verdict = side.judgement.verdict(side.digest)
        self.verdicts = sides[0].verdict, sides[1].verdict
        for side, other in (sides, sides[::-1]):
            side.replica.swapped(other.replica.name)
            side.replica.codec.end_round(both_merged(self.verdicts), whole=side.judgement.whole)


def _swap_part(sides: list[_Side], start: int, stop: int) -> list[Tensor]:
    """The corrections for both; none for a part that one of them refuses, nor for later parts."""
    opened = [side.open(start, stop) for side in sides]
    if any(side.verdict is not MERGED for side in sides):
        return []
    codecs = [side.replica.codec for side in sides]
    names = [codec.sends for codec in codecs]
    data = [codec.encode_changed(start, *changed) for codec, changed in zip(codecs, opened, strict=True)]
    for side, sent in zip(sides, data, strict=True):
        side.replica.bytes_sent += len(sent)
    corrections = [sides[me].take(start, *opened[me], names[1 - me], data[1 - me]) for me in (0, 1)]
    return corrections if all(side.verdict is MERGED for side in sides) else []


def _amend(sides: list[_Side], late: list[tuple[int, list[Tensor]]]) -> None:
    for start, corrections in late:
        for side, correction in zip(sides, corrections, strict=bool(corrections)):
            side.amend(start, correction)
