"""The interface of each exchange that returns a mean (not of the overlapped swap), and the arithmetic of means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from peer.rounds.contribution import Averaged, Readable, SparseContribution, parts
from peer.rounds.types import Group, Outcome, Reason


class Exchange(Protocol):
    """Averages one contribution over a group. The training thread calls it, one call at a time."""

    def average(self, contribution: Any, group: Group) -> Averaged:
        """The mean over the group, or this peer's own contribution with the outcome that says why.

        Blocks until the outcome is known, never past its deadline. No failure of a peer or of the network raises.
        """


@dataclass(frozen=True)
class Verdict:
    """Whether a partner's contribution may be used. ``distance``: ‖own − theirs‖ / ‖own‖."""

    outcome: Outcome
    distance: float | None = None
    detail: str = ""
    reason: Reason | None = None


def blend(own: Tensor, theirs: Tensor, share: float) -> None:
    """``theirs`` ← (1 − share) own + share theirs, in place, for one part."""
    if share == 0.5:
        theirs.add_(own).mul_(0.5)  # the same bits on both sides
    else:
        theirs.mul_(share).add_(own, alpha=1 - share)


def mean_of_senders(group: Sequence[SparseContribution], out: Tensor) -> None:
    """``out`` ← each element's mean over the contributions that have it, zero where none has."""
    count = torch.zeros_like(out, dtype=torch.int16)
    out.zero_()
    for sparse in group:
        out[sparse.positions] += sparse.values
        count[sparse.positions] += 1
    out.div_(count.clamp_(min=1))


def copy_own(own: Readable, out: Tensor) -> None:
    """``out`` ← ``own``, the mean over a group of one."""
    for start, stop in parts(own.numel):
        own.read(start, out[start:stop])


def square(part: Tensor) -> float:
    """‖part‖² of at most ``PART`` elements; torch sums them pairwise, so fp32 is exact enough."""
    return float(torch.dot(part, part))
