"""Error feedback of a group's all-reduce (Seide et al., 2014; Karimireddy et al., ICML 2019): what rounding loses is
sent in later rounds.

Member i keeps eᵢ, what it still owes to the sum of all contributions sᵢ. With Q the rounding and n members:

    a slice that another member averages     it sends Q(sᵢ + eᵢ)              eᵢ ← sᵢ + eᵢ − Q(sᵢ + eᵢ)
    its own slice, with the mean x̄           all use m = Q(x̄ + eᵢ / n)        eᵢ ← eᵢ + n (x̄ − m)

In x̄ its own sᵢ is not rounded. So n m + Σ eᵢ grows by what all have contributed, also when slices move to other
members. eᵢ changes when the group uses the mean, and only then: after a round that has failed sᵢ and eᵢ are sent again.
Lost are the eᵢ of a member that leaves or takes the weights of others, what is clipped (sketch.py), and of a member
that misses the verdict the rounding of its own slice; such a member sends again what it has sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.exchange.average import copy_own
from peer.exchange.group.rounding import Rounded, Rounding, Slice, borders
from peer.rounds.contribution import Readable, parts, scratch


class Owed:
    """sᵢ + eᵢ. ``kept``: eᵢ, flat fp32 on the host."""

    def __init__(self, contribution: Readable, kept: Tensor) -> None:
        self._contribution, self._kept = contribution, kept
        self.numel = contribution.numel

    def read(self, start: int, out: Tensor) -> None:
        self._contribution.read(start, out)
        out.add_(self._kept[start : start + out.numel()])


def slices(contribution: Readable, kept: Tensor | None, count: int, me: int) -> list[Slice]:
    """What each of ``count`` members gets of the member ``me``, before it is rounded. ``kept``: eᵢ, if it has one."""
    owed = contribution if kept is None else Owed(contribution, kept)
    whole = enumerate(borders(contribution.numel, count))
    return [Slice(contribution if place == me else owed, *border) for place, border in whole]


def keep(sent: Readable, rounding: Rounding, kept: Tensor) -> None:
    """``kept`` ← sᵢ + eᵢ − Q(sᵢ + eᵢ), of one slice. ``sent`` may read ``kept``."""
    for start, stop in parts(sent.numel):
        here, room = kept[start:stop], scratch(sent.numel)[: stop - start]
        sent.read(start, room)
        here.copy_(room)
        rounding.apply(room)
        here.sub_(room)


def mean_of_slices(
    group: Sequence[Readable], rounding: Rounding, out: Tensor, kept: Sequence[Tensor | None] | None = None
) -> None:
    """``out`` ← the mean that a group's all-reduce gives, bit for bit where nothing is clipped.

    ``kept``: eᵢ of each, which become those of after this round.
    """
    count, owed = len(group), kept or [None] * len(group)
    given = [slices(*each, count, me) for me, each in enumerate(zip(group, owed, strict=True))]
    for place, (start, stop) in enumerate(borders(out.numel(), count)):
        total, room, own = out[start:stop].zero_(), torch.empty(stop - start), owed[place]
        for me in range(count):
            sent = given[me][place]
            copy_own(sent if me == place else Rounded(sent, rounding), room)
            total.add_(room)
        exact = total.mul_(1 / count).clone()
        if own is not None:
            total.add_(own[start:stop], alpha=1 / count)
        rounding.apply(total)
        for me, mine in enumerate(owed):
            if mine is not None and me == place:
                mine[start:stop].add_(exact.sub_(total), alpha=count)
            elif mine is not None:
                keep(given[me][place], rounding, mine[start:stop])
