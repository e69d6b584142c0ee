"""The words that the parts of a round share: a contribution goes in, a group swaps it, an average comes out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

from pydantic import Field
from torch import Tensor

if TYPE_CHECKING:
    from peer.streams import Stream


class Outcome(StrEnum):
    """How a round's exchange ended. Only ``MERGED`` brought in another peer's weights."""

    MERGED = "merged"
    ALONE = "alone"  # nobody to meet
    TIMEOUT = "timeout"  # the partner froze, died or was too slow
    REFUSED = "refused"  # one side did not accept the other's header or contribution
    CORRUPT = "corrupt"  # the payload did not match its digest
    POISONED = "poisoned"  # not what an honest peer would send: see exchange/guard.py


class Reason(StrEnum):
    """Why what a partner sent was not used."""

    HEADER = "header"  # another run, configuration, layout, size or codec
    PROTOCOL = "protocol"  # not the protocol at all
    DIGEST = "digest"  # what arrived is not what was sent
    NOT_FINITE = "not_finite"
    NORM = "norm"  # out of all proportion to one's own
    FAR = "far"  # it would change far more than partners do usually
    REPLAYED = "replayed"  # merged before


class Grouping(StrEnum):
    """Who takes part in a method's outer step."""

    NOBODY = "nobody"
    PAIR = "pair"  # one random partner; a peer that finds none, or loses it, goes on alone
    EVERYONE = "everyone"  # all live peers at once


class Lineage(NamedTuple):
    """What slow weights are made of. Peers with the same ``digest`` have had the same averages of everyone, in the same
    order; ``contributions`` is how many went into them, so of two lineages the one with more has more work in it.
    """

    digest: Annotated[str, Field(max_length=64)] = ""
    contributions: Annotated[int, Field(ge=0, le=2**53)] = 0

    def after(self, digest: str, members: int) -> Lineage:
        """One round more, whose average of ``members`` peers has this digest."""
        line = hashlib.sha256((self.digest + digest).encode()).hexdigest()[:32]
        return Lineage(line, self.contributions + members)


NO_ROUNDS = Lineage()


@dataclass(frozen=True)
class Link:
    """A partner that stands at the same boundary. ``stream`` is ``None`` inside one process."""

    peer_id: str
    name: str
    stream: Stream | None = None


@dataclass(frozen=True)
class Seat:
    """One member of a group that was called together: where to reach it."""

    peer_id: str
    name: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assembly:
    """A group of everyone. ``seats`` are in the same order for all members; ``me`` is this peer's place in it.

    The convener, who called the group together, has a stream to every other member in ``controls`` (by place);
    a member has one, to the convener. ``token`` names this attempt.
    """

    token: str
    seats: tuple[Seat, ...]
    me: int
    convener: int
    controls: dict[int, Stream]


@dataclass(frozen=True)
class Group:
    """Who averages in this round, this peer left out; no links means alone.

    ``tokens``: what this peer has trained on since its last average, the weight of its contribution in a pair's swap.
    ``lost``: others are there, but none could be met; ``behind``: this peer's slow weights are not theirs, and
    ``behind`` has them.
    """

    round: int
    links: tuple[Link, ...] = ()
    assembly: Assembly | None = None
    tokens: int = 1
    lost: str = ""
    behind: Seat | None = None


class Readable(Protocol):
    """A flat fp32 vector of ``numel`` elements that is computed part by part, so it needs no copy of its own."""

    @property
    def numel(self) -> int: ...

    def read(self, start: int, out: Tensor) -> None:
        """Write elements ``start : start + len(out)`` into ``out`` (1-D fp32, host)."""


class Contribution(Readable, Protocol):
    """What a peer puts into an average."""

    def read_both(self, start: int, out: Tensor, change: Tensor) -> None:
        """As :meth:`read`, and ``change`` ← what the inner steps since the last average have done to it."""


@dataclass(frozen=True)
class Sparse:
    """A few elements of a vector of ``numel``; the others are not zero but unknown.

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
