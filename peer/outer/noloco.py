"""NoLoCo's outer step (arXiv 2506.10911, Eq. 1 to 3), with one tensor on the wire instead of two.

With Δᵢ = θᵢ − φᵢ and the group's mean over n peers

    δᵢ ← α δᵢ + mean_j(β Δⱼ + γ φⱼ) − γ φᵢ
    φᵢ ← φᵢ + δᵢ
    θᵢ ← φᵢ

so a peer sends sⱼ = β Δⱼ + γ φⱼ = β θⱼ + (γ − β) φⱼ and needs nothing else of its partner. (The sign of β is
that of the paper's Eq. 32; Eq. 2 as printed ascends.) Stable in mean square for 0 < γ < 2(1 − α²).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from peer.config.schema import NoLoCoConfig
from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import Contribution
from peer.rounds.types import Grouping


class NoLoCo:
    """Two peers partially average their weights; see the module's formula."""

    grouping: ClassVar[Grouping] = Grouping.PAIR
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights, settings: NoLoCoConfig) -> None:
        self.slow = slow
        self.settings = settings
        self.momentum = slow.zeros()  # δ

    def contribution(self) -> Contribution:
        """sᵢ = β θᵢ + (γ − β) φᵢ, computed part by part."""
        return _Contribution(self.slow, self.settings)

    def apply(self, mean: Tensor) -> None:
        """``mean``: mean of s over the group."""
        with self.slow.changing():
            self.momentum.mul_(self.settings.alpha).add_(mean).sub_(self.slow.phi, alpha=self.settings.gamma)
            self.slow.phi.add_(self.momentum)
        self.slow.write_fast()

    # -- part by part, beside the inner steps (peer/training/overlapped.py)

    def open(self, start: int, own: Tensor, change: Tensor) -> None:
        """The outer step of elements ``start : start + len(own)`` with a group of one; before it ``own`` ← s and
        ``change`` ← βΔ.

        When the partner's s comes, :meth:`amend` with half the difference makes it the step of a group of two: both
        formulas are linear in the mean.
        """
        here = slice(start, start + own.numel())
        self.contribution().read_both(start, own, change)
        with self.slow.changing():
            momentum, phi = self.momentum[here], self.slow.phi[here]
            momentum.mul_(self.settings.alpha).add_(own).sub_(phi, alpha=self.settings.gamma)
            phi.add_(momentum)
        self.slow.write_fast(here.start, here.stop)

    def amend(self, start: int, correction: Tensor) -> None:
        """As if the mean had been ``correction`` more: δ, φ and θ, which keeps what was trained since."""
        here = slice(start, start + correction.numel())
        with self.slow.changing():
            self.momentum[here].add_(correction)
            self.slow.phi[here].add_(correction)
        self.slow.add_to_fast(correction, start)


class _Contribution:
    def __init__(self, slow: SlowWeights, settings: NoLoCoConfig) -> None:
        self._slow, self._settings = slow, settings
        self.numel = slow.numel

    def read(self, start: int, out: Tensor) -> None:
        beta, gamma = self._settings.beta, self._settings.gamma
        self._slow.read_fast(start, out)
        out.mul_(beta)
        if gamma != beta:
            out.add_(self._slow.phi[start : start + out.numel()], alpha=gamma - beta)

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        """``change``: βΔ = s − γφ."""
        self.read(start, out)
        torch.sub(out, self._slow.phi[start : start + out.numel()], alpha=self._settings.gamma, out=change)
