"""The mean of the weights of several replicas, and the distance of each replica to it.

Only the mean and one replica are in memory, fp32 on the host. Distances are summed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MeanWeights:
    """``tensors``: the mean of the replicas added so far, by name; bit-equal to the weights of a single replica."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._count = 0

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """θ̄ ← θ̄ + (θ − θ̄) / n for the n-th replica; every replica has the same names and shapes."""
        self._count += 1
        for name, value in weights.items():
            if self._count == 1:
                self.tensors[name] = value.clone()
            else:
                self.tensors[name].lerp_(value, 1 / self._count)

    def square_norm(self) -> float:
        """‖θ̄‖²."""
        return sum(_square(value) for value in self.tensors.values())

    def square_distance(self, weights: Mapping[str, Tensor]) -> float:
        """‖θ − θ̄‖²."""
        return sum(_square(value - self.tensors[name]) for name, value in weights.items())


def _square(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2
