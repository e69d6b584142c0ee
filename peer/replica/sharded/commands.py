"""The commands of rank 0 to the other ranks, which all of them carry out in the same order, and the answers.

``start`` and ``stop`` are positions in the flat vector of all parameters. ``key`` is the optimizer's name of a moment,
or empty for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer.config.schema import Config

TokenRows = NDArray[np.int64]  # token ids, this rank's share of a batch


@dataclass(frozen=True)
class ReplicaPlan:
    """The first command: build your part of the replica."""

    config: Config
    device: str  # cpu or cuda
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
class ReadElements:
    """Copy your part of these elements into the window."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class FillElements:
    """Copy your part of these elements from the window."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class WriteFast:
    """θ[start:stop] ← φ."""

    start: int
    stop: int


@dataclass(frozen=True)
class AddToFast:
    """θ[start:stop] += window."""

    start: int
    stop: int


@dataclass(frozen=True)
class NewMoments:
    """Reset the optimizer. By parameter and key: a number, or ``None`` for values that :class:`FillElements` sets."""

    kinds: dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Leave:
    """End the process, with this exit code."""

    code: int


Command = ReplicaPlan | Step | Evaluate | ReadElements | FillElements | WriteFast | AddToFast | NewMoments | Leave
RankAnswer = str  # why the rank cannot go on; empty: it has carried out the command
