"""The micro-batch that fits the memory of this machine. The arithmetic of a step is the same with any."""

from __future__ import annotations

import bisect

from peer.commands.check.training import GIB
from peer.config.schema import Config
from peer.device.accelerator import pick_device
from peer.errors import UserError
from peer.replica import memory
from peer.replica.model import parameters_of

WEIGHT_AND_GRADIENT = 8  # bytes of a parameter, the least that any training needs


def fitting(config: Config, ranks: int = 1) -> int | None:
    """The largest number of sequences that fits at once; ``None``: the whole batch. What the user has set stays.

    Raises :class:`UserError` when not even one sequence fits, by the estimate of ``noloco-peer check``.
    """
    if config.peer.micro_batch is not None or config.run.batch_size % ranks:
        return config.peer.micro_batch  # training says what is wrong
    _require_room_for_weights(config, ranks)
    rows = config.run.batch_size // ranks
    if not _lack(config, ranks, rows):
        return None
    sizes = [size for size in range(1, rows) if rows % size == 0]
    fits = bisect.bisect(sizes, False, key=lambda size: bool(_lack(config, ranks, size)))
    if not fits:
        raise _too_large(_lack(config, ranks, 1))
    return sizes[fits - 1]


def _require_room_for_weights(config: Config, ranks: int) -> None:
    """The estimate takes minutes for a model that is far too large; its parameters are counted in seconds."""
    least = WEIGHT_AND_GRADIENT * parameters_of(config.run) // ranks
    lack = _shortage(config, memory.Memory(least, 0, {}, 0), ranks)
    if lack:
        raise _too_large(lack)


def _lack(config: Config, ranks: int, size: int) -> str:
    """What is too small for ``size`` sequences at once, with its figures; empty when all fit."""
    peer = config.peer.model_copy(update={"micro_batch": size})
    return _shortage(config, memory.estimate(config.run, peer, ranks), ranks)


def _shortage(config: Config, needed: memory.Memory, ranks: int) -> str:
    for what, (count, free) in memory.room(needed, pick_device(config.peer.device), ranks).items():
        if count > memory.TIGHT_SHARE * free:
            return f"about {count / GIB:,.2f} GiB of {what} needed, {free / GIB:,.2f} GiB free"
    return ""


def _too_large(lack: str) -> UserError:
    return UserError(
        f"this run does not fit this machine: {lack}; end other programs or take a larger machine, or try it all the "
        "same: --set peer.micro_batch=1"
    )
