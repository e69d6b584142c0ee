"""What every outer method offers to the loop. A method knows its formula; who averages, and how, it does not."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from peer.outer.slow_weights import SlowWeights
from peer.rounds import Contribution


class OuterMethod(Protocol):
    """One outer step: ``apply(mean of contribution() over the group)``. A group of one is the formula with n = 1."""

    group_size: ClassVar[int]  # 1: no exchange, 2: a pair
    slow: SlowWeights

    @property
    def momentum(self) -> Tensor | None:
        """Flat fp32 on the host, or ``None`` when the method has none."""

    def contribution(self) -> Contribution:
        """What this peer puts into the average; reads θ and φ when asked, so use it before ``apply``."""

    def apply(self, mean: Tensor) -> None:
        """New slow weights from ``mean`` (flat fp32, host, not changed), then θ ← φ."""
