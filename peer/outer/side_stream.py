"""Copies of parts between an accelerator and the host beside the inner steps: the training thread waits for none.

A copy to the host follows what the compute stream was given before it. Its buffer may be read when its event has
completed. A copy to the device precedes what the compute stream is given after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Completion(Protocol):
    """The event after a copy."""

    def query(self) -> bool:
        """Has the copy completed?"""

    def synchronize(self) -> None:
        """Wait for it."""


@dataclass(frozen=True)
class Fetched:
    """Elements ``start : stop`` of θ at one moment, on their way to the host. ``theta``: in θ's dtype, valid once
    :meth:`arrived`; ``None`` on a CPU, where θ itself is read.
    """

    start: int
    stop: int
    theta: Tensor | None = None
    copied: Completion | None = None

    def arrived(self, *, wait: bool = False) -> bool:
        """May it be read? ``wait``: until it may."""
        if self.copied is not None and wait:
            self.copied.synchronize()
        return self.copied is None or self.copied.query()


class SideStream:
    """A stream of an accelerator for copies, and pinned memory for them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def download(self, snapshot: Tensor) -> tuple[Tensor, Completion]:
        """A copy in pinned memory, and its event. ``snapshot``: on the device; nobody changes it."""
        host = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(snapshot, non_blocking=True)
        snapshot.record_stream(self._stream)  # its memory is not used again before the copy
        return host, self._stream.record_event()

    def upload(self, numel: int, fill: Callable[[Tensor], object]) -> Tensor:
        """An fp32 vector on the device, for the compute stream. ``fill`` writes it on the host."""
        host = torch.empty(numel, dtype=torch.float32, pin_memory=True)  # torch frees it after the copy
        fill(host)
        with torch.cuda.stream(self._stream):
            moved = torch.empty(numel, dtype=torch.float32, device=self._device)
            moved.copy_(host, non_blocking=True)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        moved.record_stream(compute)
        return moved
