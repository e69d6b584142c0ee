"""The device and the precision of a replica."""

from __future__ import annotations

import torch

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
