"""The commands of rank 0 to the other ranks, which all of them carry out in the same order, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer.config.schema import Config

TokenRows = NDArray[np.int64]  # token ids, this rank's share of a batch


@dataclass(frozen=True)
class ReplicaPlan:
    """The first command: build your part of the replica."""

    config: Config
    device: str  # its type
    bf16: bool
    numel: int  # of all parameters
    window: int  # elements of the window in shared memory
    buffers: dict[str, Tensor]  # of the model


@dataclass(frozen=True)
class Step:
    """One inner step. No answer: the step has a collective."""

    rows: TokenRows
    rate: float


@dataclass(frozen=True)
class Evaluate:
    """The loss over some batches. No answer: the evaluation has a collective."""

    batches: list[TokenRows]


@dataclass(frozen=True)
class OnShards:
    """Call ``method`` of :class:`peer.replica.sharded.weights.WeightShards`. The rank answers when it has returned."""

    method: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Leave:
    """End the process, with this exit code."""

    code: int


Command = ReplicaPlan | Step | Evaluate | OnShards | Leave
RankAnswer = str  # why the rank cannot go on; empty: it has carried out the command
