"""Samples of the whole swarm: validation loss of each replica and of their mean, and spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from statistics import mean
from typing import Any

from torch import Tensor

from peer.commands.simulate.replica import Replica
from peer.replica.averaging import MeanWeights
from peer.rounds.contribution import parts, scratch

SampleRow = dict[str, Any]


class Sampler:
    """Collects ``rows``, one a sample. ``untrained``: a replica that gets the mean weights, for their loss."""

    def __init__(
        self, replicas: Sequence[Replica], untrained: Replica, validation: list[Tensor], pool: ThreadPoolExecutor
    ) -> None:
        self._replicas, self._untrained, self._validation, self._pool = replicas, untrained, validation, pool
        self.losses: list[list[float]] = []
        self.rows: list[SampleRow] = []

    def sample(self, time: float) -> None:
        """Evaluate all replicas. ``time``: in inner steps of a replica of speed 1."""
        losses = list(self._pool.map(lambda replica: replica.state.inner.evaluate(self._batches()), self._replicas))
        spread = self._mean_weights()
        inner = self._untrained.state.inner
        self.losses.append(losses)
        self.rows.append(
            {
                "time": time,
                "tokens": sum(replica.state.counters.tokens for replica in self._replicas),
                "bytes_sent": sum(replica.bytes_sent for replica in self._replicas),
                "val_loss_mean": mean(losses),
                "val_loss_worst": max(losses),
                "val_loss_averaged_model": inner.evaluate(self._validation),
                "spread": spread,
            }
        )

    def _batches(self) -> Iterator[Tensor]:
        return takewhile(lambda _: not self._untrained.stop.requested, self._validation)

    def _mean_weights(self) -> float:
        """θ of the untrained replica ← mean of all θ. Returns the spread √(Σᵢ‖θᵢ − θ̄‖² / (N · numel))."""
        slow = self._untrained.state.outer.slow
        room, square = scratch(slow.numel), 0.0
        for start, stop in parts(slow.numel):
            part, mean = {"weights": room[: stop - start]}, MeanWeights()
            for replica in self._replicas:
                replica.state.outer.slow.read_fast(start, part["weights"])
                mean.add(part)
            for replica in self._replicas:
                replica.state.outer.slow.read_fast(start, part["weights"])
                square += mean.square_distance(part)
            slow.phi[start:stop] = mean.tensors["weights"]
        slow.write_fast()
        return float((square / (len(self._replicas) * slow.numel)) ** 0.5)
