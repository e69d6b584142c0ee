"""The average of several peers' weights, and the distance of each peer from it.

Memory holds the mean, one peer's weights and the network, whatever the number of peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from peer.commands.export.sources import ExportSource
from peer.errors import UserError
from peer.replica.averaging import MeanWeights
from peer.training.checkpoint import Tensors


@dataclass(frozen=True)
class Mixed:
    """``distances`` ‖θᵢ − θ̄‖ / ‖θ̄‖ and ``losses`` by source, ``loss`` of the average; losses only where computed."""

    distances: list[float]
    losses: list[float]
    loss: float | None


def mix(network: nn.Module, sources: Sequence[ExportSource], loss_of: Callable[[nn.Module], float] | None) -> Mixed:
    """Give ``network`` the mean of the weights of ``sources``; of one source, its weights to the bit."""
    mean = MeanWeights()
    for source in sources:
        mean.add(source.weights())
    distances, losses = [], []
    for source in sources if len(sources) > 1 else ():
        weights = source.weights()
        distances.append((mean.square_distance(weights) / mean.square_norm()) ** 0.5)
        if loss_of is not None:
            _put(network, weights, source)
            losses.append(loss_of(network))
    _put(network, mean.tensors, sources[0])
    return Mixed(distances, losses, None if loss_of is None else loss_of(network))


def _put(network: nn.Module, weights: Tensors, source: ExportSource) -> None:
    """Copy ``weights`` into the parameters. Raises :class:`UserError` when names or shapes differ."""
    parameters = dict(network.named_parameters())
    shapes = {name: value.shape for name, value in parameters.items()}
    if shapes != {name: value.shape for name, value in weights.items()}:
        raise UserError(f"{source.path}: its weights do not fit the model that its configuration names")
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)
