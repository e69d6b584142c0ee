"""The interface of an outer method, the method of a peer alone, and the method that a configuration names."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from peer.config.methods import DecoupledConfig, DiLoCoConfig, LocalConfig, NoLoCoConfig
from peer.config.schema import SwarmRunConfig
from peer.outer.decoupled import Decoupled
from peer.outer.diloco import DiLoCo
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import DenseContribution, SlowWeights
from peer.rounds.contribution import Contribution, SparseContribution
from peer.rounds.types import Grouping


class OuterMethod(Protocol):
    """One outer step: ``apply(mean of contribution() over the group)``. A group of one is the formula with n = 1."""

    grouping: ClassVar[Grouping]
    # All peers hold the same φ and δ: a failed round changes none of them, and a peer that missed one copies another's.
    equal_replicas: ClassVar[bool]
    slow: SlowWeights

    @property
    def momentum(self) -> Tensor | None:
        """Flat fp32 on the host, or ``None`` when the method has none."""

    def contribution(self) -> Contribution | SparseContribution:
        """This peer's contribution. It reads θ and φ lazily, so read it before ``apply``."""

    def apply(self, mean: Tensor) -> None:
        """New slow weights from ``mean`` (flat fp32, host, not changed), then θ ← φ."""


class Local:
    """A peer that trains alone, without exchange: φ ← θ. The control without communication."""

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
        with self.slow.changing:
            self.slow.phi.copy_(mean)


def outer_method(run: SwarmRunConfig, slow: SlowWeights) -> OuterMethod:
    """The method that ``run.outer`` names. The only place that picks its class."""
    match run.outer:
        case NoLoCoConfig():
            return NoLoCo(slow, run.outer)
        case DiLoCoConfig():
            return DiLoCo(slow, run.outer)
        case DecoupledConfig():
            return Decoupled(slow, run.outer)
        case LocalConfig():
            return Local(slow)


def vector_names(run: SwarmRunConfig) -> tuple[str, ...]:
    """Of a peer's outer state (training/outer_state.py). Each vector has the model's size."""
    momentum = () if isinstance(run.outer, LocalConfig) else ("momentum",)
    return ("phi", *momentum, *(("kept",) if run.exchange.feedback else ()))
