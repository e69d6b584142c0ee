"""The average of several peers' weights, and how far from it each of them is.

The mean, one peer's weights and the network are in memory, whatever the number of peers.
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
    """By source: ``distances`` ‖θᵢ − θ̄‖ / ‖θ̄‖ and ``losses``; ``loss`` is the average's. Losses only when asked for."""

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
            put(network, weights, source)
            losses.append(loss_of(network))
    put(network, mean.tensors, sources[0])
    return Mixed(distances, losses, None if loss_of is None else loss_of(network))


def put(network: nn.Module, weights: Tensors, source: ExportSource) -> None:
    """Copy ``weights`` into the parameters of the same names, which must be the same."""
    parameters = dict(network.named_parameters())
    shapes = {name: value.shape for name, value in parameters.items()}
    if shapes != {name: value.shape for name, value in weights.items()}:
        raise UserError(f"{source.path}: its weights are not those of the model that it says it is of")
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)
