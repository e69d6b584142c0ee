"""Writes a checkpoint as the trainer does, without its helper thread, and reads it as a peer that starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peer.training.checkpoint import Checkpoints, Saved, Tensors
from peer.training.state import PeerState


def save_checkpoint(
    checkpoints: Checkpoints, step: int, state: Mapping[str, Any], tensors: Iterable[tuple[str, Tensors]]
) -> bool:
    """Returns whether it is on the disk."""
    return checkpoints.publish(checkpoints.write(step, state, tensors))


def resume(checkpoints: Checkpoints, first: PeerState, second: PeerState) -> Saved:
    """``second`` goes on where ``first`` is."""
    save_checkpoint(checkpoints, first.inner.step, first.scalars(), first.tensors())
    saved = checkpoints.newest(second.refusal)
    assert saved is not None
    second.restore(saved)
    return saved
