"""Writes a checkpoint as the trainer does, without its helper thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peer.training.checkpoint import Checkpoints, Tensors


def save_checkpoint(
    checkpoints: Checkpoints, step: int, state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensors]]
) -> bool:
    """Returns whether it is on the disk."""
    return checkpoints.publish(checkpoints.write(step, state, tensors))
