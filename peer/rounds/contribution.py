"""Input and result of an exchange: flat host vectors, contributions, the arithmetic of their mean, and its interface.

All are computed part by part: no copy is longer than 1 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from peer.rounds.types import Group, Outcome, Reason

PART = 256 * 1024  # elements of fp32: 1 MiB, the size at which the p2p daemon is fastest

MOST_OPEN, OPEN_SHARE = 64, 8  # parts of an overlapped swap that are open at once: as many, or an eighth of all


def most_open(count: int) -> int:
    """Of ``count`` parts, how many may be open at once in an overlapped swap (exchange/pair/mailbox.py)."""
    return max(MOST_OPEN, count // OPEN_SHARE)


def parts(numel: int) -> list[tuple[int, int]]:
    """Borders ``(start, stop)`` of the parts of a vector of ``numel`` elements; with none it has one empty part."""
    return [(start, min(start + PART, numel)) for start in range(0, max(numel, 1), PART)]


def host_vector(numel: int) -> Tensor:
    """Room for so many elements: flat, fp32, on the host, whatever torch's defaults are in the user's program."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def scratch(numel: int) -> Tensor:
    """Room for one part, fp32 on the host."""
    return host_vector(min(PART, numel))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, to read and to write, without a copy."""
    return memoryview(tensor.numpy().data).cast("B")


class Readable(Protocol):
    """A flat fp32 vector of ``numel`` elements that is computed part by part, so it needs no copy of its own."""

    @property
    def numel(self) -> int: ...

    def read(self, start: int, out: Tensor) -> None:
        """Write elements ``start : start + len(out)`` into ``out`` (1-D fp32, host)."""


class Contribution(Readable, Protocol):
    """A peer's input to an average: all elements."""

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        """As :meth:`read`, and ``change`` ← its change by the inner steps since the last average."""


class Vector:
    """A tensor as a contribution. 1-D fp32 on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.numel = tensor.numel()

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self._tensor[start : start + out.numel()])

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        self.read(start, out)
        change.copy_(out)


@dataclass(frozen=True)
class SparseContribution:
    """A few elements of a vector of ``numel``; the others are not zero but unknown.

    ``positions``: int64 ``[m]``, each once, less than 2**16 above ``bases``. ``values``: fp32 ``[m]`` that fp16 holds
    exactly. ``m`` and ``bases`` are the same for all peers of a run.
    """

    numel: int
    bases: Tensor
    positions: Tensor
    values: Tensor


def blend(own: Tensor, theirs: Tensor, share: float) -> None:
    """``theirs`` ← (1 − share) own + share theirs, in place, for one part."""
    if share == 0.5:
        theirs.add_(own).mul_(0.5)  # the same bits on both sides
    else:
        theirs.mul_(share).add_(own, alpha=1 - share)


def mean_of_senders(group: Sequence[SparseContribution], out: Tensor) -> None:
    """``out`` ← each element's mean over the contributions that have it, zero where none has."""
    count = torch.zeros_like(out, dtype=torch.int16)
    out.zero_()
    for sparse in group:
        out[sparse.positions] += sparse.values
        count[sparse.positions] += 1
    out.div_(count.clamp_(min=1))


def copy_own(own: Readable, out: Tensor) -> None:
    """``out`` ← ``own``, the mean over a group of one."""
    for start, stop in parts(own.numel):
        own.read(start, out[start:stop])


def square(part: Tensor) -> float:
    """‖part‖² of at most ``PART`` elements, summed in fp32: off by up to 2e-4 where all have about one magnitude."""
    return float(torch.dot(part, part))


def norm(vector: Tensor) -> float:
    """‖vector‖, 1-D fp32 on the host, summed in fp64: members compare norms."""
    each = vector.split(PART // 4)  # which torch copies
    return math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in each))


@dataclass(frozen=True)
class Averaged:
    """Result of an exchange.

    ``mean``: flat fp32 on the host, owned by the exchange until its next call: the mean over the group when
    ``outcome`` is ``MERGED``, else this peer's own contribution. An overlapped swap has none: its parts were applied
    when they came, and ``mean`` is empty.
    """

    # of every exchange
    mean: Tensor
    outcome: Outcome
    partners: tuple[str, ...] = ()  # names
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    # for reports
    distance: float | None = None  # ‖own − partner's‖ / ‖own‖ of the contributions
    staleness: float = 0.0  # inner steps from a part's contribution to the partner's arrival, mean over the parts
    detail: str = field(default="", compare=False)  # why it was not merged, as a sentence
    reason: Reason | None = None  # the same as a value, when this peer refused
    unresolved: int = 0  # blocks of the partner that int8 or int4 could not resolve; they were left as they were

    # who is to blame: ids
    culprits: tuple[str, ...] = ()  # of who made a group's round fail, or whose contribution cannot be used
    certain: bool = True  # it was them; else it may have been another member

    # of a pair: for backoff and divergence
    partner_id: str = ""
    chosen: bool = False  # this peer has proposed the meeting to it
    strange: bool = False  # the two contributions had nothing in common, by the parts so far
    ahead: int = 0  # rounds that the partner is ahead, by its header

    # of a group
    digest: str = ""  # of the mean of a group of everyone: the same for all members
    unheard: str = ""  # the same, when the leader's verdict has not come: the others may have used that mean


class Exchange(Protocol):
    """Averages one contribution over a group, for the training thread. Overlapped swaps: exchange/pair/mailbox.py."""

    def average(self, contribution: Any, group: Group) -> Averaged:
        """The mean over the group, or this peer's own contribution with the outcome that says why.

        Blocks until the outcome is known, never past its deadline. No failure of a peer or of the network raises.
        """
