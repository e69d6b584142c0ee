"""No exchange: φ ← θ. The control without communication."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from peer.outer.slow_weights import DenseContribution, SlowWeights
from peer.rounds.types import Grouping


class Local:
    """A peer that trains alone."""

    grouping: ClassVar[Grouping] = Grouping.NOBODY
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights) -> None:
        self.slow = slow
        self.momentum = None

    def contribution(self) -> DenseContribution:
        """θ itself."""
        return DenseContribution(self.slow, beta=1, gamma=1)

    def apply(self, mean: Tensor) -> None:
        """``mean``: θ, because the group is this peer alone. θ does not change."""
        with self.slow.changing():
            self.slow.phi.copy_(mean)
