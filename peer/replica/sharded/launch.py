"""The place of this process among the ranks that torchrun has started, and whether the run fits their number."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from peer.config.schema import Config
from peer.errors import UserError


@dataclass(frozen=True)
class Rank:
    """Number ``number`` of the ``size`` ranks of a peer."""

    number: int
    size: int
    port: int  # of torchrun's store; no other peer on this machine has it


def of(environment: Mapping[str, str]) -> Rank | None:
    """The rank from torchrun's variables; ``None`` without torchrun, and for a single rank.

    Raises :class:`UserError`, in one rank of each machine, for ranks that cannot be one peer.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment["WORLD_SIZE"] == "1":
        return None
    number, size, here = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if environment["LOCAL_RANK"] == "0":
        if here != size:
            raise UserError(
                f"torchrun: {size} ranks on several machines, {here} of them on this one; "
                "a peer is one machine: start one on each, with --nnodes 1"
            )
        if sys.platform != "linux":
            raise UserError("torchrun: a peer of several ranks needs Linux; start one without torchrun")
    return Rank(number, size, int(environment["MASTER_PORT"]))


def require_fit(config: Config, size: int, gpus: int | None) -> None:
    """Raise :class:`UserError` unless the ranks have equal work and each has its own GPU (``None``: on the CPU)."""
    batch, micro = config.run.batch_size, config.peer.micro_batch
    if config.peer.offload != "none":
        raise UserError("peer.offload is for a peer of one rank; set it to none, or start without torchrun")
    if gpus is not None and gpus < size:
        raise UserError(f"torchrun: {size} ranks for {gpus} GPUs; use --nproc-per-node {gpus}, or peer.device: cpu")
    if batch % size:
        raise UserError(
            f"run.batch_size {batch} is not a multiple of the {size} ranks that torchrun has started; "
            "choose --nproc-per-node so that it is"
        )
    if micro and (batch // size) % micro:
        raise UserError(
            f"peer.micro_batch {micro} does not divide the {batch // size} sequences of a rank "
            f"(run.batch_size {batch}, {size} ranks); lower it"
        )
