"""NoLoCo's outer step (arXiv 2506.10911, Eq. 1 to 3), with one tensor on the wire instead of two.

With Δᵢ = θᵢ − φᵢ and the group's mean over n peers

    δᵢ ← α δᵢ + mean_j(β Δⱼ + γ φⱼ) − γ φᵢ
    φᵢ ← φᵢ + δᵢ
    θᵢ ← φᵢ

so a peer sends the one tensor sⱼ = β Δⱼ + γ φⱼ = β θⱼ + (γ − β) φⱼ. (The sign of β is that of the paper's Eq. 32; Eq. 2
as printed ascends.) Stable in mean square for 0 < γ < 2(1 − α²).

After a run's last inner step Δ is zero, and a few more swaps bring all replicas to their mean. They are this formula
with α 0, β 1, γ 1: sᵢ = φᵢ and φᵢ ← mean_j φⱼ. (θᵢ is φᵢ only up to rounding, which would pass for training, so it is
not read.) Momentum would carry each replica on along the last changes of itself and its partners, which differ from
peer to peer; a γ below 1 would leave a part of each difference.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from peer.config.methods import NoLoCoConfig
from peer.outer.slow_weights import DenseContribution, Fetched, SlowWeights
from peer.rounds.contribution import parts, scratch
from peer.rounds.types import Grouping

PLAIN_MEAN = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)


class NoLoCo:
    """Two peers partially average their weights; see the module's formula."""

    grouping: ClassVar[Grouping] = Grouping.PAIR
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights, settings: NoLoCoConfig) -> None:
        self.slow = slow
        self.settings = settings
        self.momentum = slow.zeros()  # δ
        self._run_ended = False

    def contribution(self) -> DenseContribution:
        """sᵢ = β θᵢ + (γ − β) φᵢ; after :meth:`end_run` φᵢ, whose change is exactly 0."""
        if self._run_ended:
            return DenseContribution(self.slow, 0.0, 1.0)
        return DenseContribution(self.slow, self.settings.beta, self.settings.gamma)

    def end_run(self) -> None:
        """No inner step follows: from now on each step is the plain mean of φ. δ keeps no momentum."""
        self.settings, self._run_ended = PLAIN_MEAN, True

    def apply(self, mean: Tensor) -> None:
        """``mean``: mean of s over the group."""
        with self.slow.changing:
            self._advance(slice(None), mean)
        self.slow.write_fast()

    def merge(self, mean: Tensor) -> Tensor:
        """As :meth:`apply`. Returns ``mean``, overwritten by the correction that :meth:`amend` would have got: the mean
        less this peer's own s.
        """
        contribution, own = self.contribution(), scratch(self.slow.numel)
        with self.slow.changing:
            for start, stop in parts(self.slow.numel):
                contribution.read(start, own[: stop - start])
                self._advance(slice(start, stop), mean[start:stop])
                mean[start:stop].sub_(own[: stop - start])
        self.slow.write_fast()
        return mean

    # -- part by part, during the inner steps (boundaries/overlapped.py): first with a group of one, then corrected when
    # the partner's part has arrived

    def open(self, fetched: Fetched, own: Tensor, change: Tensor) -> bool:
        """``own`` (fp32, host) ← s, ``change`` ← βΔ of the elements that were ``fetched`` and have arrived; then their
        step with a group of one. θ keeps its training since.

        Both formulas are linear in the mean, so :meth:`amend` with half the difference of the two s makes it the step
        of a group of two. Returns ``False``, without a step, if s is not finite.
        """
        self.contribution().read_both(fetched.start, own, change, fetched)
        if not math.isfinite(own.sum()):  # in a fiftieth of the time of a look at each element
            return False
        with self.slow.changing:
            self._advance(slice(fetched.start, fetched.stop), own)
        self.slow.follow(fetched)
        return True

    def amend(self, start: int, correction: Tensor) -> None:
        """Add ``correction`` (fp32, host), the mean over the group less this peer's own contribution, to the mean
        afterwards: δ, φ and θ change by it; θ keeps its training since.
        """
        here = slice(start, start + correction.numel())
        with self.slow.changing:
            self.momentum[here].add_(correction)
            self.slow.shift(correction, start)

    def _advance(self, here: slice, mean: Tensor) -> None:
        """δ and φ of the elements ``here``, by their mean of s."""
        momentum, phi = self.momentum[here], self.slow.phi[here]
        momentum.mul_(self.settings.alpha).add_(mean).sub_(phi, alpha=self.settings.gamma)
        phi.add_(momentum)
