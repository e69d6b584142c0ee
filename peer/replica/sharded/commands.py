"""What rank 0 tells the other ranks to do, in the order in which all of them do it, and what they answer.

``start`` and ``stop`` are borders in the flat vector of all parameters; ``key`` is the optimizer's name of a moment,
or empty for the weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer.config.schema import Config

TokenRows = NDArray[np.int64]  # token ids, this rank's share of a batch


@dataclass(frozen=True)
class ReplicaPlan:
    """The first command: what every rank builds its part of the replica from."""

    config: Config
    device: str  # cpu or cuda
    bf16: bool
    numel: int  # of all parameters
    window: int  # elements of the memory through which weights pass
    buffers: dict[str, Tensor]  # what the model keeps beside its parameters


@dataclass(frozen=True)
class Step:
    """One inner step. No answer: the ranks meet in it."""

    rows: TokenRows
    rate: float


@dataclass(frozen=True)
class Evaluate:
    """The loss over some batches. No answer either."""

    batches: list[TokenRows]


@dataclass(frozen=True)
class ReadElements:
    """Copy what you have of these elements into the window."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class FillElements:
    """Take what you have of these elements from the window."""

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
    """Begin the optimizer anew. By parameter and key: a number, or ``None`` for what :class:`FillElements` fills."""

    kinds: dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Leave:
    """End the process, with this exit code."""

    code: int


Command = ReplicaPlan | Step | Evaluate | ReadElements | FillElements | WriteFast | AddToFast | NewMoments | Leave


@dataclass(frozen=True)
class CommandDone:
    """The command is carried out."""


@dataclass(frozen=True)
class CommandFailed:
    """This rank cannot go on."""

    text: str


RankAnswer = CommandDone | CommandFailed


def rows_of(batch: Tensor, number: int, size: int) -> Any:
    """The share of rank ``number`` in ``batch`` (``[B, T + 1]``, B a multiple of ``size``)."""
    each = batch.shape[0] // size
    return batch[number * each : (number + 1) * each].numpy()
