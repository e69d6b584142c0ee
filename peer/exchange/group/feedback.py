"""Error feedback of a group's all-reduce (Seide et al., 2014; Tang et al., ICML 2019): what rounding loses is sent in
later rounds.

Member i keeps eᵢ. Of its contribution sᵢ, with Q the rounding:

    a slice that another member averages      it sends Q(sᵢ + eᵢ)           eᵢ ← sᵢ + eᵢ − Q(sᵢ + eᵢ)
    its own slice, with the mean x̄            all use m = Q(x̄ + t eᵢ)       eᵢ ← x̄ + eᵢ − m

In x̄ its own sᵢ is not rounded. t is the first of :data:`SHARES` with which x̄ − m is not so long that the group could
take m for a false mean (sketch.py).

eᵢ changes when the group uses the mean, and only then: after a round that has failed sᵢ and eᵢ are sent again. What is
lost when members come, go or miss a verdict is at most the rounding of one round (peer/exchange/README.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peer.exchange.group.rounding import Rounded, Rounding, Slice, borders
from peer.rounds.contribution import Readable, copy_own, host_vector, norm, parts, scratch

SHARES = (1.0, 0.5, 0.25, 0.0)  # of what is kept of a mean


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


def round_mean(
    mean: Tensor, kept: Tensor | None, norms: Sequence[float], rounding: Rounding
) -> tuple[list[bytes], Tensor]:
    """``mean`` ← m; returns the bytes that bring it, and x̄ − m. ``norms``: of the contributions to it."""
    exact, most = mean.clone(), rounding.most_lost * sum(norms) / len(norms)
    for share in SHARES if kept is not None else (0.0,):
        if kept is not None:
            mean.copy_(exact).add_(kept, alpha=share)
        sent = rounding.apply(mean)
        lost = exact - mean
        if norm(lost) <= most:
            break
    return sent, lost


def mean_of_slices(
    group: Sequence[Readable], rounding: Rounding, out: Tensor, kept: Sequence[Tensor | None] | None = None
) -> None:
    """``out`` ← the mean that a group's all-reduce gives, bit for bit where nothing is clipped.

    ``kept``: eᵢ of each, which become those of after this round.
    """
    count, owed = len(group), kept or [None] * len(group)
    given = [slices(*each, count, me) for me, each in enumerate(zip(group, owed, strict=True))]
    for place, (start, stop) in enumerate(borders(out.numel(), count)):
        total, room, own, norms = out[start:stop].zero_(), host_vector(stop - start), owed[place], []
        for me in range(count):
            sent = given[me][place]
            copy_own(sent if me == place else Rounded(sent, rounding), room)
            norms.append(norm(room))
            total.add_(room)
        _, lost = round_mean(total.mul_(1 / count), None if own is None else own[start:stop], norms, rounding)
        for me, mine in enumerate(owed):
            if mine is not None and me == place:
                mine[start:stop].add_(lost)
            elif mine is not None:
                keep(given[me][place], rounding, mine[start:stop])
