"""AdamW on the host (``peer.offload: optimizer``), for an accelerator with little memory.

The accelerator keeps the weights, with which the model computes, and each gradient only until it is copied; a compiled
model gives all of them at once (memory.py: ``one_by_one``). The host has fp32 copies of the weights, the gradients and
the moments, and runs torch's AdamW on them. README.md says what crosses the bus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from peer.config.schema import Config
from peer.device.copies import Copied, has_streams, host_zeros, side_stream

UNDER_WAY_BYTES = 256 * 2**20  # of gradients that are being copied, or two of them: the device computes on meanwhile


def may_offload(config: Config, ranks: int) -> bool:
    """Would ``peer.offload: optimizer`` be accepted, and is it not set?"""
    return ranks == 1 and config.run.inner.optimizer == "adamw" and config.peer.offload == "none"


class HostCopies:
    """Of ``parameters`` of one device, in fp32. ``of``: the copy of each one, with the sum of its gradients as
    ``grad`` once :meth:`collect` has returned. The parameters themselves keep no gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        own = list(parameters)
        device = own[0].device
        self._side, self._streams = side_stream(device), has_streams(device)
        pieces = host_zeros(sum(it.numel() for it in own), device).split([it.numel() for it in own])
        self.of = {it: nn.Parameter(piece.view(it.shape)) for it, piece in zip(own, pieces, strict=True)}
        self._versions: dict[nn.Parameter, int] = {}
        self._coming: deque[tuple[nn.Parameter, Copied]] = deque()
        self._under_way = 0  # bytes
        for parameter in own:
            parameter.register_post_accumulate_grad_hook(self._take)

    def collect(self) -> list[nn.Parameter]:
        """The copies, after all gradients have arrived."""
        while self._coming:
            self._arrive()
        return list(self.of.values())

    def refresh(self) -> None:
        """Copy the parameters that have changed since :meth:`write_back`."""
        for parameter, copy in self.of.items():
            if parameter._version != self._versions.get(parameter):
                copy.copy_(parameter)

    def write_back(self) -> None:
        """The parameters take the values of their copies, which do not change before the next gradients have arrived.

        So the host does not wait: on one stream these come after it.
        """
        for parameter, copy in self.of.items():
            parameter.copy_(copy, non_blocking=self._streams)
            self._versions[parameter] = parameter._version

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """After each backward pass: the gradient leaves the device."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        copy = self.of[parameter]  # type: ignore[index]
        if self._side is None:
            _accumulate(copy, gradient.cpu().contiguous())
            return
        self._coming.append((copy, self._side.download(gradient)))
        self._under_way += gradient.nbytes
        while self._coming and (self._coming[0][1].arrived() or self._crowded):
            self._arrive()  # the host runs ahead of the device, whose memory would fill with gradients

    @property
    def _crowded(self) -> bool:
        return len(self._coming) > 2 and self._under_way > UNDER_WAY_BYTES

    def _arrive(self) -> None:
        copy, gradient = self._coming.popleft()
        gradient.arrived(wait=True)
        self._under_way -= gradient.host.nbytes
        _accumulate(copy, gradient.host)


class HostAdamW(Optimizer):
    """Steps the parameters of a device as ``adamw`` steps their copies. ``adamw``: an optimizer of the copies.

    Its groups are those of the copies. Its state is by parameter as of an optimizer on the device, with values on the
    host, so that checkpoints are the same.
    """

    def __init__(self, copies: HostCopies, adamw: Optimizer) -> None:
        super().__init__(adamw.param_groups, {})
        self._copies, self._adamw = copies, adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, after :meth:`HostCopies.collect`. ``closure`` is not called."""
        self._copies.refresh()
        for parameter, copy in self._copies.of.items():
            self._adamw.state[copy] = self.state[parameter]  # one dictionary, also when it was restored
        self._adamw.step()
        self._copies.write_back()


def under_way_bytes(sizes: Sequence[int]) -> int:
    """Of gradients of these ``sizes`` (bytes), what is copied at once at most."""
    largest = sorted(sizes)[-2:]
    return min(sum(sizes), max(UNDER_WAY_BYTES + largest[-1], sum(largest)))


def _accumulate(copy: nn.Parameter, gradient: Tensor) -> None:
    with torch.no_grad():
        if copy.grad is None:
            copy.grad = gradient
        else:
            copy.grad += gradient
