"""Fast weights that are sharded over several ranks, and slow weights in memory that all ranks map.

FSDP2 divides a parameter's rows into equal parts and gives rank r the r-th part, which is a contiguous piece of the
flat vector. So each rank copies its own pieces, and the flat vector equals that of a peer of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from peer.device.copies import pin_in_place
from peer.outer.slow_weights import Fetched, SlowWeights, Span, moments_of
from peer.replica.sharded.channel import SharedMemory
from peer.replica.sharded.commands import OnShards
from peer.replica.sharded.launch import Rank
from peer.replica.sharded.ranks import Ranks

FAST = ""  # the key of the weights; all other keys are the optimizer's


class WeightShards(SlowWeights):
    """The weights of one rank. The methods read and change this rank's elements only.

    ``start`` and ``stop`` are positions in the flat vector of all parameters. ``key`` is the optimizer's name of a
    moment, or :data:`FAST`.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer, shared: SharedMemory, rank: Rank
    ) -> None:
        super().__init__(parameters, shared.phi)
        self._side = None  # the window is one buffer, and each use of it is waited for
        self.optimizer, self.window = optimizer, shared.window
        self._rank = rank
        if self._pinned:
            pin_in_place(shared.whole, self._device)  # so that this process's device copies from it and to it directly

    def read(self, key: str, start: int, stop: int) -> None:
        """Window ← elements ``start : stop``."""
        with torch.no_grad():
            for low, high, piece in self._of(key, start, stop):
                self.window[low - start : high - start].copy_(piece)

    def fill(self, key: str, start: int, stop: int) -> None:
        """Elements ``start : stop`` ← window."""
        with torch.no_grad():
            for low, high, piece in self._of(key, start, stop):
                piece.copy_(self.window[low - start : high - start])

    def add_window(self, start: int, stop: int) -> None:
        """θ[start:stop] += window."""
        super().add_to_fast(self.window[: stop - start], start)

    def new_moments(self, kinds: Mapping[str, Mapping[str, float | None]]) -> None:
        """Reset the optimizer. By parameter and key: a number, or ``None`` for values that :meth:`fill` sets."""
        self.optimizer.state.clear()
        for span in self.spans:
            shard = span.parameter.detach()
            fresh = {
                key: torch.zeros_like(shard) if value is None else torch.tensor(value, device=shard.device)
                for key, value in kinds.get(span.name, {}).items()
            }
            if fresh:
                self.optimizer.state[span.parameter] = fresh

    def _fast(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        return self._of(FAST, start, stop)

    def _of(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        def local(span: Span) -> tuple[int, Tensor]:
            whole: Any = self.optimizer.state[span.parameter][key] if key else span.parameter
            return self._first(span), whole.detach().to_local().view(-1)

        return self._pieces(start, stop, local)

    def _first(self, span: Span) -> int:
        """This rank's first element of a parameter: rows are divided as by torch.chunk."""
        rows = span.parameter.shape[0]
        each = -(-rows // self._rank.size)
        return min(self._rank.number * each, rows) * (span.parameter.numel() // rows)


class GatheredWeights(WeightShards):
    """:class:`SlowWeights` in rank 0: each method calls one of :class:`WeightShards` in all ranks."""

    def __init__(self, *parts: Any, ranks: Ranks) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def read_fast(self, start: int, out: Tensor, fetched: Fetched | None = None) -> None:
        self._gather(FAST, start, out)

    def write_fast(self, start: int = 0, stop: int | None = None) -> None:
        self._on_all(WeightShards.write_fast, start, stop)

    def add_to_fast(self, change: Tensor, start: int = 0) -> None:
        for low, high in self._windows(start, start + change.numel()):
            with self._ranks.lock:  # the commands share the window
                self.window[: high - low].copy_(change[low - start : high - start])
                self._on_all(WeightShards.add_window, low, high)

    def tensors(self) -> dict[str, Tensor]:
        return {span.name: self._whole(FAST, span) for span in self.spans}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for span in self.spans:
            self._scatter(FAST, span, tensors[span.name])

    def moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        found = {}
        for span in self.spans:
            for key, value in optimizer.state.get(span.parameter, {}).items():
                whole = value.shape == span.parameter.shape
                found[f"{span.name}/{key}"] = self._whole(key, span) if whole else value
        return found

    def take_moments(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], *, copy: bool = False) -> None:
        kinds: dict[str, dict[str, float | None]] = {}
        for span in self.spans:
            kept, shape = moments_of(span, tensors), span.parameter.shape
            if kept:
                kinds[span.name] = {key: None if it.shape == shape else float(it) for key, it in kept.items()}
        self._on_all(WeightShards.new_moments, kinds)
        for span in self.spans:
            for key, value in kinds.get(span.name, {}).items():
                if value is None:
                    self._scatter(key, span, tensors[f"{span.name}/{key}"])

    def _whole(self, key: str, span: Span) -> Tensor:
        out = torch.empty(span.parameter.shape)
        self._gather(key, span.start, out.view(-1))
        return out

    def _gather(self, key: str, start: int, out: Tensor) -> None:
        for low, high in self._windows(start, start + out.numel()):
            with self._ranks.lock:
                self._on_all(WeightShards.read, key, low, high)
                out[low - start : high - start].copy_(self.window[: high - low])

    def _scatter(self, key: str, span: Span, value: Tensor) -> None:
        flat = value.reshape(-1)
        for low, high in self._windows(span.start, span.stop):
            with self._ranks.lock:
                self.window[: high - low].copy_(flat[low - span.start : high - span.start])
                self._on_all(WeightShards.fill, key, low, high)

    def _windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        size = self.window.numel()
        return ((low, min(low + size, stop)) for low in range(start, stop, size))

    def _on_all(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of :class:`WeightShards` in the other ranks and in this one, and wait for all."""
        self._ranks.ask(OnShards(method, arguments), partial(method, self, *arguments))
