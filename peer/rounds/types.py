"""The words that the parts of a round share: a contribution goes in, a group swaps it, an average comes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field

if TYPE_CHECKING:
    from peer.p2p.stream import Stream


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


@dataclass(frozen=True)
class Link:
    """A partner that stands at the same boundary. ``stream`` is ``None`` inside one process."""

    peer_id: str
    name: str
    stream: Stream | None = None


@dataclass(frozen=True)
class Seat:
    """A member of a group that was called together, as peers name it to one another: where to reach it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    peer_id: Annotated[str, Field(max_length=128)]
    name: Annotated[str, Field(max_length=64)]
    addresses: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=8)] = ()


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
