"""What every outer method offers to the loop. A method knows its formula; who averages, and how, it does not."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import Contribution, SparseContribution
from peer.rounds.types import Grouping


class PartwiseMethod(Protocol):
    """An outer step that can be taken part by part, first alone and then amended by what a partner sent."""

    slow: SlowWeights

    def open(self, start: int, own: Tensor, change: Tensor) -> None:
        """Elements ``start : start + len(own)`` with a group of one; ``own`` and ``change`` (fp32, host) ← their
        contribution and what the inner steps have done to it.
        """

    def amend(self, start: int, correction: Tensor) -> None:
        """``correction`` (fp32, host): the mean over the group, less this peer's own contribution."""


class OuterMethod(Protocol):
    """One outer step: ``apply(mean of contribution() over the group)``. A group of one is the formula with n = 1."""

    grouping: ClassVar[Grouping]
    # All peers hold the same φ and δ: a round that fails changes nobody's, and who missed one takes the others'.
    equal_replicas: ClassVar[bool]
    slow: SlowWeights

    @property
    def momentum(self) -> Tensor | None:
        """Flat fp32 on the host, or ``None`` when the method has none."""

    def contribution(self) -> Contribution | SparseContribution:
        """What this peer puts into the average; reads θ and φ when asked, so use it before ``apply``."""

    def apply(self, mean: Tensor) -> None:
        """New slow weights from ``mean`` (flat fp32, host, not changed), then θ ← φ."""
