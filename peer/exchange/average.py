"""The interface of every exchange, and the acceptance test that stands before every average.

Implementations: pair.py (one partner over a verified stream), group.py (everyone), loopback.py (in one process).
tests/unit/test_exchange_conformance.py runs the same suite on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peer.rounds import Averaged, Contribution, Group, Outcome, Sparse
from peer.vectors import parts, scratch


class GroupAverage(Protocol):
    """Averages one contribution over a group. Called by the training thread, one call at a time."""

    def average(self, contribution: Contribution | Sparse, group: Group) -> Averaged:
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


def judge(own: Contribution, theirs: Tensor, max_norm_ratio: float) -> Verdict:
    """``theirs`` (flat fp32, host) must be finite and of a norm within ``max_norm_ratio`` of our own."""
    room = scratch(own.numel)
    own_square = their_square = distance_square = 0.0
    for start, stop in parts(own.numel):
        mine, other = room[: stop - start], theirs[start:stop]
        own.read(start, mine)
        own_square += square(mine)
        their_square += square(other)
        distance_square += square(mine.sub_(other))
    objection = norm_objection(own_square, their_square, max_norm_ratio)
    if objection:
        return Verdict(Outcome.POISONED, detail=objection)
    own_norm = math.sqrt(own_square)
    return Verdict(Outcome.MERGED, distance=math.sqrt(distance_square) / own_norm if own_norm else 0.0)


def norm_objection(own_square: float, their_square: float, max_norm_ratio: float) -> str:
    """Why a contribution with this ‖·‖² must not be used beside our own; empty when it may."""
    if not math.isfinite(their_square):
        return "the partner's contribution is not finite"
    own_norm, their_norm = math.sqrt(own_square), math.sqrt(their_square)
    if not own_norm / max_norm_ratio <= their_norm <= own_norm * max_norm_ratio:
        return f"the partner's norm {their_norm:.4g} is not within a factor {max_norm_ratio:g} of {own_norm:.4g}"
    return ""


def merge(own: Contribution, theirs: Tensor, share: float = 0.5) -> None:
    """``theirs`` ← (1 − share) own + share theirs, in place. With equal shares both partners get equal bits."""
    room = scratch(own.numel)
    for start, stop in parts(own.numel):
        mine = room[: stop - start]
        own.read(start, mine)
        if share == 0.5:
            theirs[start:stop].add_(mine).mul_(0.5)
        else:
            theirs[start:stop].mul_(share).add_(mine.mul_(1 - share))


def mean_of(group: Sequence[Contribution], out: Tensor) -> None:
    """``out`` ← mean over ``group``, summed in the group's order. Of two the same bits as :func:`merge`."""
    room = scratch(out.numel())
    for start, stop in parts(out.numel()):
        total = out[start:stop].zero_()
        for contribution in group:
            contribution.read(start, room[: stop - start])
            total.add_(room[: stop - start])
        total.mul_(1 / len(group))


def mean_of_senders(group: Sequence[Sparse], out: Tensor) -> None:
    """``out`` ← each element's mean over those in ``group`` that have it, zero where nobody has."""
    count = torch.zeros_like(out, dtype=torch.int16)
    out.zero_()
    for sparse in group:
        out[sparse.positions] += sparse.values
        count[sparse.positions] += 1
    out.div_(count.clamp_(min=1))


def copy_own(own: Contribution, out: Tensor) -> None:
    """``out`` ← own: the mean over a group of one."""
    for start, stop in parts(own.numel):
        own.read(start, out[start:stop])


def square(part: Tensor) -> float:
    """‖part‖², summed in float64."""
    return float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
