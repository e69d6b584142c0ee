"""The device and the precision of a replica."""

from __future__ import annotations

import torch
from torch import Tensor

from peer.errors import UserError


def pick_device(wish: str) -> torch.device:
    """``auto``: the accelerator if there is one. Raises :class:`UserError` for ``cuda`` without an accelerator."""
    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise UserError("peer.device: cuda is not available here; look at nvidia-smi and the torch build, or use cpu")
    return torch.device("cuda" if available and wish != "cpu" else "cpu")


def wants_bf16(precision: str, device: torch.device) -> bool:
    """Whether to use bf16 autocast. ``auto``: only if the device computes in bf16."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def release_memory(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to ``device``."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Arriving:
    """A number, or a scalar of an accelerator that is read without waiting for the work queued behind it."""

    def __init__(self, value: Tensor | float) -> None:
        self._host, self._copied = value, None
        if isinstance(value, Tensor) and value.device.type == "cuda":
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def value(self, *, wait: bool = False) -> float | None:
        """The number, or ``None`` before it has arrived. ``wait``: until then."""
        if self._copied is not None and wait:
            self._copied.synchronize()
        return float(self._host) if self._copied is None or self._copied.query() else None
