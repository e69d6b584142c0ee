"""Copies between an accelerator and the host, beside its work where it has streams: the training thread waits for none.

A copy to the host follows what the compute stream was given before it. Its buffer may be read when its event has
completed. A copy to the device precedes what the compute stream is given after it.

Such copies need memory that the system cannot move (pinned). CUDA and XPU have both. MPS has no streams, and a copy
that is not waited for cannot be read safely: there, as on a CPU, every copy is complete when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.device.accelerator import module_of
from peer.device.memory import is_out_of_memory
from peer.errors import UserError
from peer.logs import get_logger

log = get_logger("device")

_STREAMS = ("cuda", "xpu")


def has_streams(device: torch.device) -> bool:
    """Does it copy beside its work, from pinned memory and to it?"""
    return device.type in _STREAMS


@dataclass(frozen=True)
class Copied:
    """``host``: what may be read once :meth:`arrived`. ``event``: after the copy; ``None`` when none is under way."""

    host: Tensor
    event: torch.Event | None

    def arrived(self, *, wait: bool = False) -> bool:
        """May it be read? ``wait``: until it may."""
        if self.event is not None and wait:
            self.event.synchronize()
        return self.event is None or self.event.query()


class SideStream:
    """A stream of an accelerator for copies each way, and pinned memory for them: a copy to the device, for which the
    next step waits, waits for no other, and both ways of the bus are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._down, self._up = self._module.Stream(device), self._module.Stream(device)

    def download(self, snapshot: Tensor) -> Copied:
        """A copy in pinned memory. ``snapshot``: on the device; nobody changes it."""
        host = torch.empty(snapshot.shape, dtype=snapshot.dtype, device="cpu", pin_memory=True)
        self._down.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._down):
            host.copy_(snapshot, non_blocking=True)
        snapshot.record_stream(self._down)  # its memory is not used again before the copy
        return Copied(host, self._down.record_event())

    def upload(self, numel: int, fill: Callable[[Tensor], object]) -> Tensor:
        """An fp32 vector on the device, for the compute stream. ``fill`` writes it on the host."""
        host = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True)  # torch frees it after the copy
        fill(host)
        with self._module.stream(self._up):
            moved = torch.empty(numel, dtype=torch.float32, device=self._device)
            moved.copy_(host, non_blocking=True)
        compute = self._module.current_stream(self._device)
        compute.wait_stream(self._up)
        moved.record_stream(compute)
        return moved


def copied_scalar(value: Tensor | float) -> Copied:
    """A number, or a scalar of an accelerator that is read without waiting for the work queued behind it.

    On a device without streams reading it waits for all queued work.
    """
    if not isinstance(value, Tensor):
        return Copied(torch.tensor(value, dtype=torch.float64, device="cpu"), None)
    if not has_streams(value.device):
        return Copied(value, None)
    host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    host.copy_(value.detach(), non_blocking=True)
    return Copied(host, module_of(value.device).current_stream(value.device).record_event())


def side_stream(device: torch.device) -> SideStream | None:
    """``None`` for a device without streams."""
    return SideStream(device) if has_streams(device) else None


def host_zeros(numel: int, device: torch.device) -> Tensor:
    """A flat fp32 vector on the host, pinned where ``device`` copies from such memory. Raises :class:`UserError`."""
    try:
        return torch.zeros(numel, dtype=torch.float32, device="cpu", pin_memory=has_streams(device))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"the host gives no {4 * numel / 2**30:.2f} GiB of memory that the accelerator copies from (pinned); free "
            "some, raise its limit (ulimit -l, WSL's memory), or choose a smaller model"
        ) from None


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
            with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel, whichever it is, would raise it
                torch.zeros(1, dtype=torch.float32, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; a CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
