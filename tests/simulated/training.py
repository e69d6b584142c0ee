"""The inner half of a simulated peer: a model of time, with a quadratic loss whose weights are exchanged for real."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from peer import clock
from peer.outer.method import OuterMethod
from peer.process import LoopContext
from peer.replica.inner_loop import InnerReport
from peer.rounds.state import Lineage
from peer.training.outer_state import OuterState

RATE = 0.05  # share of the way to its optimum that a peer goes in one step
FLOOR = 1.0  # of the loss
TOKENS = 64  # of an inner step


class PacedLoop:
    """Each step takes about ``seconds`` and goes towards what one batch of this peer makes of the ``optimum``."""

    def __init__(self, weights: nn.Parameter, optimum: Tensor, seconds: float, context: LoopContext, seed: int) -> None:
        self.step = 0
        self.loss: float | None = None
        self._weights, self._optimum, self._seconds = weights, optimum, seconds
        self._context, self._chance = context, random.Random(seed)
        self._noise = torch.Generator().manual_seed(seed)

    def run(self, batches: Iterable[None]) -> InnerReport:
        began, steps, losses = clock.monotonic(), 0, [math.nan]
        for _ in batches:
            clock.sleep(self._seconds * self._chance.uniform(0.9, 1.1))
            with torch.no_grad():
                batch = torch.randn(self._optimum.shape, generator=self._noise).add_(self._optimum)
                self._weights.add_(batch - self._weights, alpha=RATE)
            losses.append(self._loss())
            self.loss = losses[-1]
            steps, self.step = steps + 1, self.step + 1
            self._context.progress.tick()
            if self._context.away:
                break
        spread = stdev(losses[1:]) if steps > 1 else math.nan
        loss = fmean(losses[1:]) if steps else math.nan
        seconds = clock.monotonic() - began
        return InnerReport(steps, steps * TOKENS, loss, losses[-1], 1.0, 1e-3, seconds, steps, spread)

    def evaluate(self, batches: Iterable[None]) -> float:
        clock.sleep(self._seconds)
        return self._loss()

    def _loss(self) -> float:
        return FLOOR + float((self._weights.detach() - self._optimum).square().mean())


class Endless:
    """A data stream."""

    def take(self, count: int) -> Iterator[None]:
        return iter([None] * count)


@dataclass
class Disk:
    """What outlives a process: the last checkpoint."""

    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class SimulatedState(OuterState):
    """The state of a peer on ``disk``."""

    inner: PacedLoop

    def __init__(self, inner: PacedLoop, outer: OuterMethod, disk: Disk, *, feedback: bool) -> None:
        super().__init__(inner, outer, feedback=feedback)
        self.stream, self._disk = Endless(), disk

    def forget(self) -> None: ...

    def scalars(self) -> dict[str, Any]:
        return {"inner_step": self.inner.step, **vars(self.counters)}

    def tensors(self) -> dict[str, Tensor]:
        named = {**self.outer.slow.tensors(), **self.saved_vectors()}
        return {name: tensor.clone() for name, tensor in named.items()}

    def resume(self) -> None:
        """Continue from the disk, if it has a checkpoint."""
        if not self._disk.scalars:
            return
        self.outer.slow.take(self._disk.tensors)
        self.take_outer(self._disk.tensors)
        self.inner.step = self._disk.scalars["inner_step"]
        for name in vars(self.counters):
            setattr(self.counters, name, self._disk.scalars[name])
        self.counters.lineage = Lineage(*self.counters.lineage)


class DiskCheckpoints:
    """The product's ``Checkpoints`` in memory: a checkpoint is whole or absent."""

    def __init__(self, disk: Disk, seconds: float) -> None:
        self._disk, self._seconds = disk, seconds

    def write(self, step: int, scalars: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        clock.sleep(self._seconds)
        return scalars, tensors

    def publish(self, written: Any) -> bool:
        clock.sleep(self._seconds)
        self._disk.scalars, self._disk.tensors = written
        return True
