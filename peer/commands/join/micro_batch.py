"""The micro-batch that fits the memory of this machine. The arithmetic of a step is the same with any."""

from __future__ import annotations

import bisect

from peer.commands.check.training import GIB
from peer.config.schema import Config
from peer.device.accelerator import pick_device
from peer.device.memory import device_memory
from peer.errors import RunError, UserError
from peer.replica import memory
from peer.replica.model import parameters_of

WEIGHT_AND_GRADIENT = 8  # bytes of a parameter, the least that any training needs


def fitting(config: Config, ranks: int = 1) -> int | None:
    """The largest number of sequences that fits at once; ``None``: the whole batch. What the user has set stays.

    When not even one sequence fits, by the estimate of ``noloco-peer check``, it raises :class:`RunError` if it would
    fit all of the memory: a service tries again, and others may use less then. :class:`UserError` if it never fits.
    """
    if config.peer.micro_batch is not None or config.run.batch_size % ranks:
        return config.peer.micro_batch  # training says what is wrong
    # counted in seconds; the estimate takes minutes for a model that is far too large
    least = WEIGHT_AND_GRADIENT * parameters_of(config.run) // ranks
    if lack := _shortage(config, memory.Memory(least, 0, {}, 0, 0), ranks):
        raise lack
    rows = config.run.batch_size // ranks
    if not _lack(config, ranks, rows):
        return None
    sizes = [size for size in range(1, rows) if rows % size == 0]
    fits = bisect.bisect(sizes, False, key=lambda size: bool(_lack(config, ranks, size)))
    if fits:
        return sizes[fits - 1]
    if lack := _lack(config, ranks, 1):
        raise lack
    return 1  # there is more room than a moment ago


def _lack(config: Config, ranks: int, size: int) -> UserError | RunError | None:
    """What is too small for ``size`` sequences at once, with its figures; ``None`` when all fit."""
    peer = config.peer.model_copy(update={"micro_batch": size})
    return _shortage(config, memory.estimate(config.run, peer, ranks), ranks)


def _shortage(config: Config, needed: memory.Memory, ranks: int) -> UserError | RunError | None:
    """What is too small for good goes before what other programs have now."""
    device, for_now = pick_device(config.peer.device), None
    for what, (count, free) in memory.room(needed, device, ranks).items():
        if count <= memory.TIGHT_SHARE * free:
            continue
        total = device_memory(device).total if what == memory.GPU_MEMORY else memory.machine_memory()
        later = count <= memory.TIGHT_SHARE * total
        lack = (RunError if later else UserError)(
            f"this run does not fit this machine: about {count / GIB:,.2f} GiB of {what} needed, {free / GIB:,.2f} GiB "
            f"free; {'end other programs' if later else 'take a larger machine'}, or try it all the same: "
            "--set peer.micro_batch=1"
        )
        if not later:
            return lack
        for_now = for_now or lack
    return for_now
