"""Validation losses of one replica: for its reports, and to judge weights that others offer (catch_up.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.telemetry.metrics import PhaseClock
from peer.training.state import PeerState


@dataclass(frozen=True)
class Validation:
    """``batches`` of the run's validation set and ``others``, by name, of further sets: ``[B, T + 1]`` token ids each.

    All losses are in nats a token.
    """

    state: PeerState
    phase: PhaseClock
    vocabulary: int
    batches: Sequence[Tensor]
    others: Mapping[str, Sequence[Tensor]]

    @property
    def chance(self) -> float:
        """The loss of a model that only guesses."""
        return math.log(self.vocabulary)

    def losses(self) -> tuple[float, dict[str, float]]:
        """Of this replica: on the validation set, and on the others by name."""
        with self.phase("eval"):
            evaluate = self.state.inner.evaluate
            return evaluate(self.batches), {name: evaluate(batches) for name, batches in self.others.items()}

    def own_loss(self) -> float:
        """Of this replica on the validation set."""
        with self.phase("eval"):
            return self.state.inner.evaluate(self.batches)

    def loss_of(self, phi: Tensor) -> float:
        """Of a replica with these slow weights (flat fp32, host) on the validation set."""
        with self.state.trying(phi):
            return self.own_loss()
