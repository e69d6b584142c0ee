"""Validation losses of one replica: for its reports, and to judge weights that others offer (catch_up.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from peer.telemetry.metrics import PhaseClock
from peer.training.state import PeerState


class Validation:
    """``batches`` of the run's validation set and ``others``, by name, of further sets: ``[B, T + 1]`` token ids each.

    ``chance``: the loss of a model that only guesses. All losses are in nats a token.
    """

    def __init__(
        self,
        state: PeerState,
        phase: PhaseClock,
        vocabulary: int,
        batches: Sequence[Tensor],
        others: Mapping[str, Sequence[Tensor]],
    ) -> None:
        self.chance = math.log(vocabulary)
        self._state, self._phase, self._batches, self._others = state, phase, batches, others

    def losses(self) -> tuple[float, dict[str, float]]:
        """Of this replica: on the validation set, and on the others by name."""
        with self._phase("eval"):
            inner = self._state.inner
            return inner.evaluate(self._batches), {name: inner.evaluate(it) for name, it in self._others.items()}

    def own_loss(self) -> float:
        """Of this replica on the validation set."""
        with self._phase("eval"):
            return self._state.inner.evaluate(self._batches)

    def loss_of(self, phi: Tensor) -> float:
        """Of a replica with these slow weights (flat fp32, host) on the validation set."""
        with self._state.trying(phi):
            return self.own_loss()
