"""Validation losses of one replica: for its reports, and to check the weights of a member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.telemetry.metrics import ActivityTimer
from peer.training.state import PeerState

WORSE = 1.2  # times this peer's own loss: that with a member's weights, of other rounds, may be so much worse
SAMPLE_BATCHES, SAMPLE_TOKENS = 8, 4096  # of a sample: the first batches until there are so many


def sample_of(batches: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first of them that are enough to compare two losses: with 4,096 tokens their ratio scatters by half a percent
    between models as far apart as those of two peers.
    """
    count = -(-SAMPLE_TOKENS // (batches[0].shape[0] * (batches[0].shape[1] - 1))) if batches else 0
    return batches[: min(count, SAMPLE_BATCHES)]


@dataclass(frozen=True)
class Validation:
    """``batches`` of the run's validation set and ``others``, by name, of further sets: ``[B, T + 1]`` token ids each.

    All losses are in nats a token. ``chance``: the loss of a uniform guess.
    """

    state: PeerState
    timer: ActivityTimer
    chance: float
    batches: Sequence[Tensor]
    others: Mapping[str, Sequence[Tensor]]

    def losses(self) -> tuple[float, dict[str, float]]:
        """This replica's losses: on the validation set, and on the other sets by name."""
        with self.timer("eval"):
            return self.own_loss(), {name: self.state.inner.evaluate(batches) for name, batches in self.others.items()}

    def own_loss(self) -> float:
        """This replica's loss on the validation set."""
        with self.timer("eval"):
            return self.state.inner.evaluate(self.batches)

    def sample_losses(self) -> list[float]:
        """The same on a sample of it, by batch."""
        with self.timer("eval"):
            return [self.state.inner.evaluate([batch]) for batch in sample_of(self.batches)]

    def loss_of(self, phi: Tensor) -> float:
        """The loss of the slow weights ``phi`` (flat fp32, host) on the validation set."""
        with self.state.trying(phi):
            return self.own_loss()
