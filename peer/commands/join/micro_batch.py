"""The micro-batch that fits the memory of this machine. The arithmetic of a step is the same with any."""

from __future__ import annotations

import bisect

from peer.config.schema import Config
from peer.device.accelerator import pick_device
from peer.errors import UserError
from peer.replica import memory

GIB = 2**30


def fitting(config: Config, ranks: int = 1) -> int | None:
    """The largest number of sequences that fits at once; ``None``: the whole batch. What the user has set stays.

    Raises :class:`UserError` when not even one sequence fits, by the estimate of ``noloco-peer check``.
    """
    if config.peer.micro_batch is not None or config.run.batch_size % ranks:
        return config.peer.micro_batch  # training says what is wrong
    rows = config.run.batch_size // ranks
    if not _lack(config, ranks, rows):
        return None
    sizes = [size for size in range(1, rows) if rows % size == 0]
    fits = bisect.bisect(sizes, False, key=lambda size: bool(_lack(config, ranks, size)))
    if not fits:
        raise UserError(
            f"this run does not fit this machine: {_lack(config, ranks, 1)}; end other programs or take a larger "
            "machine, or try it all the same: --set peer.micro_batch=1"
        )
    return sizes[fits - 1]


def _lack(config: Config, ranks: int, size: int) -> str:
    """What is too small for ``size`` sequences at once, with its figures; empty when all fit."""
    peer = config.peer.model_copy(update={"micro_batch": size})
    needed = memory.estimate(config.run, peer, ranks)
    for what, (count, free) in memory.room(needed, pick_device(peer.device), ranks).items():
        if count > memory.TIGHT_SHARE * free:
            return f"about {count / GIB:.2f} GiB of {what} needed, {free / GIB:.2f} GiB free"
    return ""
