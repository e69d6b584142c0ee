"""Slow weights φ on the host beside the fast weights θ of the model; the only place where the two are copied.

Host memory of the outer step: φ here, the momentum δ of the method, and the exchange's one buffer. Everything
is computed part by part, so no further copy of the model is made.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Span:
    """One parameter's place in the flat vector: elements ``start : start + numel``."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class SlowWeights:
    """Flat fp32 view of a model's trained parameters, in ``named_parameters`` order.

    ``phi``: slow weights, 1-D fp32 on the host, pinned when the model is on an accelerator.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.spans: list[Span] = []
        start = 0
        for name, parameter in parameters:
            if parameter.requires_grad:
                self.spans.append(Span(name, parameter, start))
                start += parameter.numel()
        if not self.spans:
            raise ValueError("the model has no parameter that is trained")
        self._starts = [span.start for span in self.spans]
        self.numel = start
        self._pinned = self.spans[0].parameter.is_cuda
        self.phi = torch.empty(self.numel, dtype=torch.float32, pin_memory=self._pinned)
        self._changing = threading.RLock()
        self.read_fast(0, self.phi)

    def zeros(self) -> Tensor:
        """A new host vector of the same length, for example a momentum.

        Where it is not pinned the system hands out its zeros page by page as they are first written, in the first
        outer step: with large models torch.zeros takes seconds of the start.
        """
        if self._pinned:
            return torch.zeros(self.numel, dtype=torch.float32, pin_memory=True)
        return torch.from_numpy(np.zeros(self.numel, dtype=np.float32))

    def read_fast(self, start: int, out: Tensor) -> None:
        """``out`` ← θ[start : start + len(out)], as fp32 on the host."""
        stop = start + out.numel()
        with torch.no_grad():
            for low, high, theta in self._fast(start, stop):
                out[low - start : high - start].copy_(theta)

    def write_fast(self, start: int = 0, stop: int | None = None) -> None:
        """θ[start:stop] ← φ[start:stop], in place, in the parameters' own dtype and on their device."""
        with torch.no_grad():
            for low, high, theta in self._fast(start, self.numel if stop is None else stop):
                theta.copy_(self.phi[low:high], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()  # φ may change as soon as this returns

    def add_to_fast(self, change: Tensor, start: int = 0) -> None:
        """θ[start : start + len(change)] += ``change`` (flat fp32, host), in place."""
        with torch.no_grad():
            for low, high, theta in self._fast(start, start + change.numel()):
                theta.add_(change[low - start : high - start].to(theta.device, theta.dtype))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Held while φ or a momentum changes, so that a snapshot for a newcomer is never torn."""
        with self._changing:
            yield

    def layout(self) -> str:
        """Names and shapes in order: two peers can only average when theirs are equal."""
        return ";".join(f"{span.name}:{','.join(map(str, span.parameter.shape))}" for span in self.spans)

    def _fast(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """The pieces of θ[start:stop] where they live: borders in the flat vector, and a flat view."""
        first = bisect_right(self._starts, start) - 1
        for span in takewhile(lambda span: span.start < stop, self.spans[first:]):
            low, high = max(start, span.start), min(stop, span.stop)
            yield low, high, span.parameter.detach().view(-1)[low - span.start : high - span.start]


class Change:
    """Δ = θ − φ as a contribution: what the inner steps did."""

    def __init__(self, slow: SlowWeights) -> None:
        self._slow = slow
        self.numel = slow.numel

    def read(self, start: int, out: Tensor) -> None:
        self._slow.read_fast(start, out)
        out.sub_(self._slow.phi[start : start + out.numel()])

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        change.copy_(out)
