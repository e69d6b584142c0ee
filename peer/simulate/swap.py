"""The swap of two replicas in one process, through their codecs: at once, or part by part beside their inner steps."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.exchange.average import merge
from peer.exchange.codec import Codec, prepare, size
from peer.exchange.flight import rolling_parts
from peer.outer.noloco import NoLoCo
from peer.rounds import Contribution
from peer.simulate.replica import Replica
from peer.vectors import parts


def swap(one: Replica, two: Replica) -> tuple[tuple[Tensor, Tensor], int]:
    """The mean that each of the two gets, flat fp32, and the bytes that each of them sends for it."""
    own, other = one.pair_contribution(), two.pair_contribution()
    for replica, contribution in ((one, own), (two, other)):
        prepare(replica.codec, contribution)
    introduce(one.codec, two.codec)
    sent = sum(size(one.codec.sends, stop - start) for start, stop in parts(own.numel))
    means = _received(one.codec, own, two.codec, other), _received(two.codec, other, one.codec, own)
    for replica in (one, two):
        replica.codec.settle(True)
    return means, sent


def introduce(one: Codec, two: Codec) -> None:
    """What the headers of a swap tell."""
    expect = one.expects, two.expects
    one.meet(expect[1])
    two.meet(expect[0])


def _received(codec: Codec, own: Contribution, sender: Codec, theirs: Contribution) -> Tensor:
    """The mean at the receiver ``codec``, whose contribution is ``own``."""
    out = torch.empty(own.numel)
    for start, stop in parts(own.numel):
        mine, part = torch.empty(stop - start), torch.empty(stop - start)
        own.read(start, mine)
        theirs.read(start, part)
        codec.decode(sender.sends, start, bytearray(sender.encode(start, part)), mine, out[start:stop])
    merge(own, out)
    return out


@dataclass(eq=False)
class Rolling:
    """An overlapped swap: a group of parts is opened between two inner steps, and amended one step later.

    Whichever replica's thread comes first makes the ``steps`` inner steps of both; the other finds them made.
    """

    one: Replica
    two: Replica
    steps: int  # inner steps that the transfer takes
    _done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        with self._lock:
            if not self._done:
                self._roll()
            self._done = True

    def _roll(self) -> None:
        borders = rolling_parts(self.one.state.outer.slow.numel)
        pair = (self.one, self.two)
        learns = [replica.codec.begin() for replica in pair]
        introduce(self.one.codec, self.two.codec)
        # at the end of a run phases are shorter than the swap: nothing is trained meanwhile, as in the peer
        beside = self.steps if min(replica.target - replica.state.inner.step for replica in pair) > self.steps else 0
        groups = max(1, beside)
        late: list[tuple[int, Tensor, Tensor]] = []
        for group in range(groups):
            self._amend(late)
            late = [self._open(start, stop, learns) for start, stop in borders[group::groups]]
            if beside:
                for replica in pair:
                    replica.train(1)
        self._amend(late)
        for replica in pair:
            replica.codec.settle(True)

    def _open(self, start: int, stop: int, learns: list[bool]) -> tuple[int, Tensor, Tensor]:
        """Both take their own outer step for a part; the corrections that follow."""
        own = []
        for replica, learn in zip((self.one, self.two), learns, strict=True):
            outer, part = replica.state.outer, torch.empty(stop - start)
            assert isinstance(outer, NoLoCo)
            if learn:
                outer.contribution().read_change(start, part)
                replica.codec.learn(start, part)
            outer.open(start, part)
            own.append(part)
        codecs = self.one.codec, self.two.codec
        names = [codec.sends for codec in codecs]
        data = [bytearray(codec.encode(start, part)) for codec, part in zip(codecs, own, strict=True)]
        corrections = []
        for me, other in ((0, 1), (1, 0)):
            theirs = torch.empty(stop - start)
            codecs[me].decode(names[other], start, data[other], own[me], theirs)
            corrections.append(theirs.sub_(own[me]).mul_(0.5))
        for replica, name in zip((self.one, self.two), names, strict=True):
            replica.bytes_sent += size(name, stop - start)
        self.one.bytes_received += size(names[1], stop - start)
        self.two.bytes_received += size(names[0], stop - start)
        return start, corrections[0], corrections[1]

    def _amend(self, late: list[tuple[int, Tensor, Tensor]]) -> None:
        for start, *corrections in late:
            for replica, correction in zip((self.one, self.two), corrections, strict=True):
                outer = replica.state.outer
                assert isinstance(outer, NoLoCo)
                outer.amend(start, correction)
