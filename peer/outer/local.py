"""No exchange: φ ← θ. The control without communication."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from peer.outer.slow_weights import SlowWeights
from peer.rounds.types import Grouping


class Local:
    """A peer that trains alone."""

    grouping: ClassVar[Grouping] = Grouping.NOBODY
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights) -> None:
        self.slow = slow
        self.momentum = None

    def contribution(self) -> _FastWeights:
        """θ itself."""
        return _FastWeights(self.slow)

    def apply(self, mean: Tensor) -> None:
        """``mean``: θ, as the group is this peer alone. θ stays as it is."""
        with self.slow.changing():
            self.slow.phi.copy_(mean)


class _FastWeights:
    def __init__(self, slow: SlowWeights) -> None:
        self._slow = slow
        self.numel = slow.numel

    def read(self, start: int, out: Tensor) -> None:
        self._slow.read_fast(start, out)

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        torch.sub(out, self._slow.phi[start : start + out.numel()], out=change)
