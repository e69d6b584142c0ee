"""The device that a replica computes on, and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from peer.errors import UserError


def pick_device(wish: str) -> torch.device:
    """``auto``: the accelerator when there is one. Raises :class:`UserError` when one is asked for and is not there."""
    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise UserError("peer.device: cuda is not available here; look at nvidia-smi and the torch build, or use cpu")
    return torch.device("cuda" if available and wish != "cpu" else "cpu")


def wants_bf16(precision: str, device: torch.device) -> bool:
    """bf16 autocast by itself only where the device computes in it."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """What waits for the accelerator, at the borders of phases only; ``None`` where nothing runs by itself."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
