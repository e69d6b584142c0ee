"""What goes into an exchange and what comes out: contributions and their average."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from peer.rounds.types import Outcome, Reason


class Readable(Protocol):
    """A flat fp32 vector of ``numel`` elements that is computed part by part, so it needs no copy of its own."""

    @property
    def numel(self) -> int: ...

    def read(self, start: int, out: Tensor) -> None:
        """Write elements ``start : start + len(out)`` into ``out`` (1-D fp32, host)."""


class Contribution(Readable, Protocol):
    """What a peer puts into an average: all elements."""

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        """As :meth:`read`, and ``change`` ← what the inner steps since the last average have done to it."""


@dataclass(frozen=True)
class SparseContribution:
    """What a peer of the decoupled method puts into an average: a few elements of a vector of ``numel``.

    The others are not zero but unknown.
    ``positions``: int64 ``[m]``, each once, less than 2**16 above ``bases``. ``values``: fp32 ``[m]`` that fp16 holds
    exactly. ``m`` and ``bases`` are the same for all peers of a run.
    """

    numel: int
    bases: Tensor
    positions: Tensor
    values: Tensor


@dataclass(frozen=True)
class Averaged:
    """Result of an exchange.

    ``mean`` is flat fp32 on the host and owned by the exchange until its next call. It is the mean over
    the group when ``outcome`` is ``MERGED`` and this peer's own contribution in every other case.
    """

    mean: Tensor
    outcome: Outcome
    partners: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    distance: float | None = None  # ‖own − partner's‖ / ‖own‖ of the contributions
    staleness: float = 0.0  # inner steps between a part's contribution and the partner's arrival; mean over the parts
    detail: str = field(default="", compare=False)  # why, in words, when not merged
    reason: Reason | None = None  # the same in a word, when it was this peer that refused
    culprit: str = ""  # id of the member that a group's round failed by, or whose contribution cannot be used
    partner_id: str = ""  # of a pair
    strange: bool = False  # a pair whose contributions, as far as they were seen, had nothing in common
    ahead: int = 0  # rounds that the partner says it is further
    digest: str = ""  # of the mean of a group of everyone: the same for all members
