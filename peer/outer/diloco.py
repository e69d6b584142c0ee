"""DiLoCo's outer step (arXiv 2311.08105, Algorithm 1): momentum SGD on the mean pseudo-gradient of all peers.

With Δᵢ = θᵢ − φ (the negative pseudo-gradient), Δ̄ its mean over the group, μ the momentum and η the learning rate

    δ ← μ δ + Δ̄
    φ ← φ + η (Δ̄ + μ δ)    Nesterov: torch's SGD(nesterov=True) on the gradient −Δ̄
    φ ← φ + η δ             heavy ball: the baseline of NoLoCo's authors (arXiv 2506.10911, section 4)
    θ ← φ

All peers begin with equal φ and δ and get equal Δ̄, so they stay equal.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from peer.config.methods import DiLoCoConfig
from peer.outer.slow_weights import DenseContribution, SlowWeights
from peer.rounds.types import Grouping


class DiLoCo:
    """Every peer averages with every other; see the module's formula."""

    grouping: ClassVar[Grouping] = Grouping.EVERYONE
    equal_replicas: ClassVar[bool] = True

    def __init__(self, slow: SlowWeights, settings: DiLoCoConfig) -> None:
        self.slow = slow
        self.settings = settings
        self.momentum = slow.zeros()  # δ

    def contribution(self) -> DenseContribution:
        """Δᵢ = θᵢ − φ."""
        return DenseContribution(self.slow, beta=1, gamma=0)

    def apply(self, mean: Tensor) -> None:
        """``mean``: Δ̄."""
        eta, mu = self.settings.learning_rate, self.settings.momentum
        with self.slow.changing:
            self.momentum.mul_(mu).add_(mean)
            if self.settings.nesterov:
                self.slow.phi.add_(mean, alpha=eta).add_(self.momentum, alpha=eta * mu)
            else:
                self.slow.phi.add_(self.momentum, alpha=eta)
        self.slow.write_fast()
