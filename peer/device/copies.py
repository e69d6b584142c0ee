"""Copies between an accelerator and the host, beside its work where it has streams: the training thread waits for none.

A copy to the host follows what the compute stream was given before it. Its buffer may be read when its event has
completed. A copy to the device precedes what the compute stream is given after it.

Such copies need memory that the system cannot move (pinned). CUDA and XPU have both. MPS has no streams, and a copy
that is not waited for cannot be read safely: there, as on a CPU, every copy is complete when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from peer.device.accelerator import module_of
from peer.logs import get_logger

log = get_logger("device")

_STREAMS = ("cuda", "xpu")


def has_streams(device: torch.device) -> bool:
    """Does it copy beside its work, from pinned memory and to it?"""
    return device.type in _STREAMS


class Completion(Protocol):
    """The event after a copy."""

    def query(self) -> bool:
        """Has the copy completed?"""

    def synchronize(self) -> None:
        """Wait for it."""


class SideStream:
    """A stream of an accelerator for copies, and pinned memory for them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = self._module.Stream(device)

    def download(self, snapshot: Tensor) -> tuple[Tensor, Completion]:
        """A copy in pinned memory, and its event. ``snapshot``: on the device; nobody changes it."""
        host = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            host.copy_(snapshot, non_blocking=True)
        snapshot.record_stream(self._stream)  # its memory is not used again before the copy
        copied: Completion = self._stream.record_event()
        return host, copied

    def upload(self, numel: int, fill: Callable[[Tensor], object]) -> Tensor:
        """An fp32 vector on the device, for the compute stream. ``fill`` writes it on the host."""
        host = torch.empty(numel, dtype=torch.float32, pin_memory=True)  # torch frees it after the copy
        fill(host)
        with self._module.stream(self._stream):
            moved = torch.empty(numel, dtype=torch.float32, device=self._device)
            moved.copy_(host, non_blocking=True)
        compute = self._module.current_stream(self._device)
        compute.wait_stream(self._stream)
        moved.record_stream(compute)
        return moved


class Arriving:
    """A number, or a scalar of an accelerator that is read without waiting for the work queued behind it.

    On a device without streams reading it waits for all queued work.
    """

    def __init__(self, value: Tensor | float) -> None:
        self._host: Tensor | float = value
        self._copied: Completion | None = None
        if isinstance(value, Tensor) and has_streams(value.device):
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value.detach(), non_blocking=True)
            self._copied = module_of(value.device).current_stream(value.device).record_event()

    def value(self, *, wait: bool = False) -> float | None:
        """The number, or ``None`` before it has arrived. ``wait``: until then."""
        if self._copied is not None and wait:
            self._copied.synchronize()
        return float(self._host) if self._copied is None or self._copied.query() else None


def side_stream(device: torch.device) -> SideStream | None:
    """``None`` for a device without streams."""
    return SideStream(device) if has_streams(device) else None


def host_zeros(numel: int, device: torch.device) -> Tensor:
    """A flat fp32 vector on the host, pinned where ``device`` copies from such memory."""
    return torch.zeros(numel, dtype=torch.float32, pin_memory=has_streams(device))


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """A batch of the host on ``device``, without waiting for the copy where that is safe."""
    if has_streams(device):
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)


def pin_in_place(memory: Tensor, device: torch.device) -> None:
    """Pin memory that torch has not allocated, which only CUDA can. A warning if it cannot."""
    if device.type == "cuda":
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            log.warning("the slow weights cannot be pinned, so copies to the GPU take longer: CUDA error %d", code)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; a CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
