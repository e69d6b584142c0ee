"""The swarm as a whole at one moment: every replica's validation loss, that of their mean, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

from torch import Tensor

from peer.commands.simulate.replica import Replica
from peer.replica.averaging import MeanWeights
from peer.replica.inner_loop import mean_loss
from peer.rounds.vectors import parts, scratch

SampleRow = dict[str, Any]


class Sampler:
    """Collects ``rows``, one a sample. ``scribble`` is a replica nobody trains, for the mean's loss."""

    def __init__(self, replicas: Sequence[Replica], scribble: Replica, validation: list[Tensor], workers: int) -> None:
        self._replicas, self._scribble, self._validation = replicas, scribble, validation
        self._workers = workers
        self.losses: list[list[float]] = []
        self.rows: list[SampleRow] = []

    def sample(self, time: float) -> None:
        """Evaluate everybody. ``time`` is in inner steps of a replica of speed 1."""
        with ThreadPoolExecutor(self._workers) as pool:
            losses = list(pool.map(lambda replica: replica.state.inner.evaluate(self._validation), self._replicas))
        spread = self._mean_weights()
        inner = self._scribble.state.inner
        self.losses.append(losses)
        self.rows.append(
            {
                "time": time,
                "tokens": sum(replica.state.counters.tokens for replica in self._replicas),
                "bytes_sent": sum(replica.bytes_sent for replica in self._replicas),
                "val_loss_mean": mean(losses),
                "val_loss_worst": max(losses),
                "val_loss_averaged_model": mean_loss(inner.model, self._validation, inner.device),
                "spread": spread,
            }
        )

    def _mean_weights(self) -> float:
        """θ of the scribble ← mean of all θ. Returns the spread √(Σᵢ‖θᵢ − θ̄‖² / (N · numel))."""
        slow = self._scribble.state.outer.slow
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
