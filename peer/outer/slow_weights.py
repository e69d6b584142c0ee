"""Slow weights φ on the host, and the fast weights θ of the model. Only this module copies between the two.

Host memory of the outer step: φ, the method's momentum δ and one buffer of the exchange. Everything is computed part by
part, so there is no further copy of the model.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from peer.device.copies import Copied, has_streams, host_zeros, side_stream, synchronize
from peer.errors import RunError


@dataclass(frozen=True)
class Span:
    """Position of one parameter in the flat vector: elements ``start : start + numel``."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True)
class Fetched:
    """Elements ``start : stop`` of θ at one moment, on their way to the host. ``copy``: in θ's dtype; ``None`` on a
    device without streams, where θ itself is read.
    """

    start: int
    stop: int
    copy: Copied | None = None

    def arrived(self, *, wait: bool = False) -> bool:
        """May it be read? ``wait``: until it may."""
        return self.copy is None or self.copy.arrived(wait=wait)


def broken_weight(name: str, step: int) -> RunError:
    """The parameter ``name`` is not finite after the inner step ``step``."""
    return RunError(
        f"the weight {name} is not finite at step {step}; nobody has got it: lower the learning rate or look at the "
        "data, then start again from your last checkpoint"
    )


class SlowWeights:
    """Flat fp32 view of a model's trained parameters, in ``named_parameters`` order.

    ``phi``: slow weights, 1-D fp32 on the host, pinned where the model's device has streams; by default a copy of
    the parameters.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], phi: Tensor | None = None) -> None:
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
        self._device = self.spans[0].parameter.device
        self._pinned = has_streams(self._device)
        self._side = side_stream(self._device)
        self.changing = threading.RLock()  # held while φ or a momentum changes: a newcomer's snapshot is of one moment
        self.phi = phi if phi is not None else host_zeros(self.numel, self._device) if self._pinned else self.zeros()
        if phi is None:
            self.read_fast(0, self.phi)

    def zeros(self) -> Tensor:
        """A new host vector of the same length, for example a momentum. No device copies it, so it is not pinned.

        It comes from NumPy: the system zeroes its pages at the first write, in the first outer step. torch.zeros takes
        seconds at the start of a large model.
        """
        return torch.from_numpy(np.zeros(self.numel, dtype=np.float32))

    def name_at(self, element: int) -> str:
        """The parameter to which this element of the flat vector belongs."""
        return self.spans[bisect_right(self._starts, element) - 1].name

    def fetch(self, start: int, stop: int) -> Fetched:
        """Begin to copy θ[start:stop] to the host, as the work leaves it that the accelerator has been given."""
        if self._side is None:
            return Fetched(start, stop)
        with torch.no_grad():
            snapshot = torch.cat([theta for _, _, theta in self._fast(start, stop)])
        return Fetched(start, stop, self._side.download(snapshot))

    def read_fast(self, start: int, out: Tensor, fetched: Fetched | None = None) -> None:
        """``out`` ← θ[start : start + len(out)], as fp32 on the host: as it is now, or as it was ``fetched``.

        For a model in 16 bits this is φ plus the change by training: the rounding by :meth:`write_fast` is undone.
        """
        stop = start + out.numel()
        with torch.no_grad():
            for low, high, theta in self._fast(start, stop):
                here = slice(low - start, high - start)
                part = out[here].copy_(theta if fetched is None or fetched.copy is None else fetched.copy.host[here])
                if theta.dtype != torch.float32:
                    phi = self.phi[low:high]
                    part.add_(phi - phi.to(theta.dtype))

    def write_fast(self, start: int = 0, stop: int | None = None) -> None:
        """θ[start:stop] ← φ[start:stop], in place, in the parameters' own dtype and on their device."""
        with torch.no_grad():
            for low, high, theta in self._fast(start, self.numel if stop is None else stop):
                theta.copy_(self.phi[low:high], non_blocking=self._pinned)
        if self._pinned:
            synchronize(self._device)  # φ may change as soon as this returns

    def follow(self, fetched: Fetched) -> None:
        """θ moves from what was ``fetched`` to φ, in place; its training since then stays."""
        if fetched.copy is None:
            self.write_fast(fetched.start, fetched.stop)
            return
        then = fetched.copy.host

        def move(out: Tensor) -> None:
            for low, high, theta in self._fast(fetched.start, fetched.stop):
                here = slice(low - fetched.start, high - fetched.start)
                torch.sub(self.phi[low:high].to(theta.dtype).float(), then[here].float(), out=out[here])

        self._add_part(fetched.start, len(then), move)

    def _add_part(self, start: int, numel: int, fill: Callable[[Tensor], object]) -> None:
        """θ[start : start + numel] += what ``fill`` writes, by the side stream. No call waits for the accelerator."""
        assert self._side is not None
        change = self._side.upload(numel, fill)
        with torch.no_grad():
            for low, high, theta in self._fast(start, start + numel):
                theta.add_(change[low - start : high - start])

    def add_to_fast(self, change: Tensor, start: int = 0) -> None:
        """θ[start : start + len(change)] += ``change`` (flat fp32, host), in place."""
        with torch.no_grad():
            for low, high, theta in self._fast(start, start + change.numel()):
                theta.add_(change[low - start : high - start].to(theta.device))

    def shift(self, change: Tensor, start: int = 0) -> None:
        """φ[start : start + len(change)] += ``change`` (flat fp32, host), and θ with it: its training stays.

        θ in 16 bits moves as far as φ rounded to them does, which is what :meth:`read_fast` counts on. By ``change``
        itself it would move by nothing or by too much, and the difference would pass for training.
        """
        moved = change
        for low, high, theta in self._fast(start, start + change.numel()):
            if theta.dtype != torch.float32:
                moved = change.clone() if moved is change else moved
                here, phi = slice(low - start, high - start), self.phi[low:high]
                moved[here] = (phi + change[here]).to(theta.dtype).float() - phi.to(theta.dtype).float()
        self.phi[start : start + change.numel()].add_(change)
        if self._side is None:
            self.add_to_fast(moved, start)
        else:
            self._add_part(start, len(moved), lambda out: out.copy_(moved))

    def layout(self) -> str:
        """Names and shapes in order: two peers can average only when these are equal."""
        return ";".join(f"{span.name}:{','.join(map(str, span.parameter.shape))}" for span in self.spans)

    # -- for a checkpoint, by name

    def tensors(self) -> dict[str, Tensor]:
        """θ by parameter. May be the live weights, not copies."""
        return {span.name: span.parameter.detach() for span in self.spans}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """θ ← ``tensors`` (host)."""
        with torch.no_grad():
            for span in self.spans:
                span.parameter.copy_(tensors[span.name])

    def moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The state of ``optimizer`` by ``<parameter>/<key>``. May be live tensors, not copies."""
        kept = ((span.name, optimizer.state.get(span.parameter, {})) for span in self.spans)
        return {f"{name}/{key}": value for name, state in kept for key, value in state.items()}

    def take_moments(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], *, copy: bool = False) -> None:
        """Restore :meth:`moments` (host tensors) where the optimizer runs; a parameter without moments starts anew.
        ``copy``: also of those that are there already.
        """
        device = optimizer.param_groups[0]["params"][0].device
        kept = {span.parameter: moments_of(span, tensors) for span in self.spans}
        # all or none: a device without room for the last ones must not cost the first ones
        moved: dict[Tensor, dict[str, Tensor]] = {
            of: {key: it.to(device, copy=copy) for key, it in state.items()} for of, state in kept.items() if state
        }
        optimizer.state.clear()
        optimizer.state.update(moved)

    def _fast(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """The pieces of θ[start:stop] on their device: borders in the flat vector, and a flat view."""
        return self._pieces(start, stop, lambda span: (0, span.parameter.detach().view(-1)))

    def _pieces(
        self, start: int, stop: int, local: Callable[[Span], tuple[int, Tensor]]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """``local``: this process' share of a parameter, as the offset of its first element and a flat view."""
        first = bisect_right(self._starts, start) - 1
        for span in self.spans[first:]:
            if span.start >= stop:
                break
            offset, here = local(span)
            begin = span.start + offset
            low, high = max(start, begin), min(stop, begin + here.numel())
            if low < high:
                yield low, high, here[low - begin : high - begin]


def moments_of(span: Span, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of :meth:`SlowWeights.moments` for one parameter."""
    return {key: it for name, it in tensors.items() for of, _, key in [name.rpartition("/")] if of == span.name}


class DenseContribution:
    """βΔ + γφ = βθ + (γ − β)φ with Δ = θ − φ, part by part; its change by the inner steps is βΔ. β 0 reads no θ."""

    def __init__(self, slow: SlowWeights, beta: float, gamma: float) -> None:
        self._slow, self._beta, self._gamma = slow, beta, gamma
        self.numel = slow.numel

    def read(self, start: int, out: Tensor, fetched: Fetched | None = None) -> None:
        if not self._beta:
            torch.mul(self._slow.phi[start : start + out.numel()], self._gamma, out=out)
            return
        self._slow.read_fast(start, out, fetched)
        out.mul_(self._beta)
        if self._gamma != self._beta:
            out.add_(self._slow.phi[start : start + out.numel()], alpha=self._gamma - self._beta)

    def read_both(self, start: int, out: Tensor, change: Tensor, fetched: Fetched | None = None) -> None:
        self.read(start, out, fetched)
        torch.sub(out, self._slow.phi[start : start + out.numel()], alpha=self._gamma, out=change)
