"""The interface of every exchange, and means part by part.

Implementations: pair/blocking.py (one partner), group/all_reduce.py and group/all_gather.py (everyone). What an
overlapped swap offers instead: pair/overlapped.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from peer.rounds.contribution import Averaged, Contribution, Readable
from peer.rounds.types import Group, Outcome, Reason
from peer.rounds.vectors import parts, scratch

Given = TypeVar("Given", contravariant=True)


class Exchange(Protocol[Given]):
    """Averages one contribution over a group. Called by the training thread, one call at a time."""

    def average(self, contribution: Given, group: Group) -> Averaged:
        """Mean over the group, or this peer's own contribution with the outcome that says why.

        Blocks until the outcome is known, never past its deadline, and raises for nothing that another
        peer or the network does. Reads ``contribution``; changes nothing but its own buffer.
        """


@dataclass(frozen=True)
class Verdict:
    """May a partner's contribution be used? ``distance`` is ‖own − theirs‖ / ‖own‖."""

    outcome: Outcome
    distance: float | None = None
    detail: str = ""
    reason: Reason | None = None


def merge(own: Readable, theirs: Tensor, share: float = 0.5) -> None:
    """:func:`blend` of all parts."""
    room = scratch(own.numel)
    for start, stop in parts(own.numel):
        own.read(start, room[: stop - start])
        blend(room[: stop - start], theirs[start:stop], share)


def blend(own: Tensor, theirs: Tensor, share: float) -> None:
    """``theirs`` ← (1 − share) own + share theirs, in place, of one part."""
    if share == 0.5:
        theirs.add_(own).mul_(0.5)  # the same bits on both sides
    else:
        theirs.mul_(share).add_(own, alpha=1 - share)


def mean_of(group: Sequence[Contribution], out: Tensor) -> None:
    """``out`` ← mean over ``group``, summed in the group's order. Of two the same bits as :func:`merge`."""
    room = scratch(out.numel())
    for start, stop in parts(out.numel()):
        total = out[start:stop].zero_()
        for contribution in group:
            contribution.read(start, room[: stop - start])
            total.add_(room[: stop - start])
        total.mul_(1 / len(group))


def copy_own(own: Readable, out: Tensor) -> None:
    """``out`` ← own: the mean over a group of one."""
    for start, stop in parts(own.numel):
        own.read(start, out[start:stop])


def square(part: Tensor) -> float:
    """‖part‖² of at most ``PART`` elements; torch sums them pairwise, so fp32 is exact enough."""
    return float(torch.dot(part, part))
