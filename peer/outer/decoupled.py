"""Decoupled momentum (Nedelkoski et al., arXiv 2510.03371): peers keep weights and momentum of their own, and share
only the momentum's largest DCT coefficients.

With Δᵢ = θᵢ − φᵢ, μ the momentum's decay, η the learning rate, T the k largest coefficients of each chunk:

    δᵢ ← μ δᵢ + Δᵢ
    qᵢ = T(DCT(δᵢ))                       what peer i sends
    Q  = mean of each coefficient over the peers that sent it
    δᵢ ← DCT⁻¹(DCT(δᵢ), with Q in place of each coefficient that a peer has sent)        variant: replace
    δᵢ ← δᵢ + DCT⁻¹(Q − qᵢ)                                                            variant: add
    φᵢ ← φᵢ + η (Δᵢ + μ δᵢ)
    θᵢ ← φᵢ

``add`` is the authors' code: a peer that did not send a coefficient keeps its own value and gets the senders' mean on
top. A coefficient grows fastest when in each round the peer with its largest value alone sends it: with n peers that is
the sum of what was sent in the n rounds before, sₜ = μ sₜ₋₁ + … + μⁿ sₜ₋ₙ. So δ is bounded whatever is sent if and only
if μ + μ² + … + μⁿ < 1: for μ < 0.618 with two peers, 0.519 with four, ½ with any number. In ``replace`` no value
exceeds the largest of before, so δ is bounded for every μ < 1.

Δᵢ itself is never averaged, so the replicas drift apart and must be averaged at the end. A peer sends a share of each
chunk's coefficients, by default 32 of 64 × 64; the authors send 32 of a chunk of any size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from peer.config.methods import DecoupledConfig
from peer.outer.dct import tilings
from peer.outer.slow_weights import DenseContribution, SlowWeights
from peer.rounds.contribution import SparseContribution, host_vector
from peer.rounds.types import Grouping


class Decoupled:
    """Peers share the largest DCT coefficients of their momentum; see the module's formula."""

    grouping: ClassVar[Grouping] = Grouping.EVERYONE
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights, settings: DecoupledConfig) -> None:
        self.slow = slow
        self.settings = settings
        self.momentum = slow.zeros()  # δ
        self._tilings = tilings(slow, settings.chunk, settings.density)
        self._change = DenseContribution(slow, beta=1, gamma=0)  # Δ
        self._sent: SparseContribution | None = None

    @property
    def coefficients(self) -> int:
        """Length of the mean that :meth:`apply` takes."""
        return self._tilings[-1].stop

    @property
    def sends(self) -> int:
        """Number of coefficients in a contribution."""
        return sum(tiling.chunks * tiling.keep for tiling in self._tilings)

    def contribution(self) -> SparseContribution:
        """T(DCT(μ δᵢ + Δᵢ)), with values that fp16 holds exactly. Changes nothing."""
        bases, positions, values = [], [], []
        for tiling in self._tilings:
            here = slice(tiling.span.start, tiling.span.stop)
            waves = tiling.forward(self._read_change(here).add_(self.momentum[here], alpha=self.settings.momentum))
            places = waves.abs().topk(tiling.keep, dim=1, sorted=False).indices
            base = tiling.start + torch.arange(tiling.chunks, dtype=torch.int64, device="cpu")[:, None] * waves.shape[1]
            bases.append(base.expand_as(places).reshape(-1))
            positions.append((places + base).reshape(-1))
            values.append(waves.gather(1, places).reshape(-1).half())
        self._sent = SparseContribution(
            self.coefficients, torch.cat(bases), torch.cat(positions), torch.cat(values).float()
        )
        return self._sent

    def apply(self, mean: Tensor) -> None:
        """``mean``: each coefficient's mean over the peers that sent it, zero where none did."""
        assert self._sent is not None, "contribution() comes first"
        eta, mu = self.settings.learning_rate, self.settings.momentum
        own = torch.zeros_like(mean)
        own[self._sent.positions] = self._sent.values
        with self.slow.changing:
            for tiling in self._tilings:
                here, waves = slice(tiling.span.start, tiling.span.stop), slice(tiling.start, tiling.stop)
                change = self._read_change(here)
                momentum, shared, old = self.momentum[here].mul_(mu).add_(change), mean[waves], own[waves]
                if self.settings.variant == "replace":
                    old = tiling.forward(momentum).view(-1).mul_((shared != 0) | (old != 0))
                momentum.add_(tiling.inverse(shared - old))  # the transform is linear
                self.slow.phi[here].add_(change, alpha=eta).add_(momentum, alpha=eta * mu)
        self._sent = None
        self.slow.write_fast()

    def _read_change(self, here: slice) -> Tensor:
        out = host_vector(here.stop - here.start)
        self._change.read(here.start, out)
        return out
