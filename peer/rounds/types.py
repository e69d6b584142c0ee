"""The types that the packages of a round share: bounded names, counters and tables, outcomes, groups and members."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import ConfigDict, Field

if TYPE_CHECKING:
    from peer.p2p.stream import Stream

# Of a peer and of a run: a word that is safe in a log line, a label and a file name. No configuration allows another.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]
Count = Annotated[int, Field(ge=0, le=2**53)]  # what JSON's readers hold exactly

Value = TypeVar("Value")


class Newest(OrderedDict[str, Value]):
    """The ``most`` ids that were set last: an id costs an attacker nothing, so what is kept of them is bounded.

    One thread may set while others read and remove: an id that is set again is never away.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, peer_id: str, value: Value) -> None:
        super().__setitem__(peer_id, value)
        with suppress(KeyError):  # another thread has removed it
            self.move_to_end(peer_id)
            if len(self) > self._most:
                self.popitem(last=False)


class Outcome(StrEnum):
    """How a round's exchange ended. Only ``MERGED`` brought in all of another peer's contribution; an overlapped
    swap that breaks off keeps the verified parts that had come."""

    MERGED = "merged"
    ALONE = "alone"  # nobody to meet
    TIMEOUT = "timeout"  # the partner froze, died or was too slow
    REFUSED = "refused"  # one side did not accept the other's header or contribution
    CORRUPT = "corrupt"  # the payload did not match its digest
    POISONED = "poisoned"  # refused by exchange/guard.py

    @property
    def failed(self) -> bool:
        """There was somebody to average with, and it came to nothing or not to all."""
        return self not in (Outcome.MERGED, Outcome.ALONE)


class Reason(StrEnum):
    """Why a partner's contribution was not used."""

    HEADER = "header"  # another size, or a codec that does not fit this peer's
    PROTOCOL = "protocol"  # not a message of the protocol
    DIGEST = "digest"  # the bytes do not match their digest
    NOT_FINITE = "not_finite"
    FAR = "far"  # it is further away than partners usually are, and has nothing in common with this peer's own
    REPLAYED = "replayed"  # merged before
    UNRESOLVED = "unresolved"  # int8 or int4 could not resolve more than a tenth of its blocks
    HARMFUL = "harmful"  # the training loss jumped after the merge, which was undone


@dataclass(frozen=True)
class Verdict:
    """Whether a partner's contribution may be used. ``distance``: ‖own − theirs‖ / ‖own‖."""

    outcome: Outcome
    distance: float | None = None
    detail: str = ""
    reason: Reason | None = None


class Grouping(StrEnum):
    """Which peers average in a method's outer step."""

    NOBODY = "nobody"
    PAIR = "pair"  # one random partner; a peer that finds none, or loses it, goes on alone
    EVERYONE = "everyone"  # all live peers at once


@dataclass(frozen=True)
class Link:
    """A partner at the same boundary. ``stream``: to that of a pair; ``None`` in a group of everyone."""

    peer_id: str
    name: str
    stream: Stream | None = None


@dataclass(frozen=True)
class Seat:
    """A member of a group, and where to reach it, as peers name it to one another."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    peer_id: Annotated[str, Field(max_length=128)]
    name: Name
    addresses: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=8)] = ()


@dataclass(frozen=True)
class Assembly:
    """A group of everyone. ``seats`` are in the same order for all members; ``me``: this peer's place in it.

    The leader, which gathered the group, has place 0 and a stream to every other member in ``controls`` (by place); a
    member has one, to the leader. ``token`` names this attempt. ``phase_seconds``: of the leader's inner phase,
    0 if it is not known: all must give up at the same time to tell whose fault it is.
    """

    token: str
    seats: tuple[Seat, ...]
    me: int
    controls: dict[int, Stream]
    phase_seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """The other peers that average in this round; no links means alone.

    ``tokens``: this peer's tokens since its last average, the weight of its contribution in a pair's swap.
    ``phase_seconds``: of its inner phase, by which a pair's swap is measured; 0 if it is not known.
    ``step_seconds``: of its inner step, between which an overlapped swap opens parts; 0 when they all are there.
    ``lost``: why no group was formed although others are there.
    ``donor``: a member that gives the others' slow weights, when this peer's differ.
    """

    round: int
    links: tuple[Link, ...] = ()
    assembly: Assembly | None = None
    tokens: int = 1
    phase_seconds: float = 0.0
    step_seconds: float = 0.0
    lost: str = ""
    donor: Seat | None = None
