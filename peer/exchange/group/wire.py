"""The messages between the members of a group, before and after their parts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.exchange.pair.wire import Header
from peer.p2p.bulk.offer import BulkOffer
from peer.p2p.stream import Message
from peer.rounds.types import Outcome

Index = Annotated[int, Field(ge=0, lt=256)]
Detail = Annotated[str, Field(max_length=200)]


class Hello(Message):
    """The first message on a stream between two members: the attempt, the sender's place, what will follow, and how."""

    kind: Literal["hello"] = "hello"
    token: Annotated[str, Field(max_length=64)]
    index: Index
    header: Header
    bulk: BulkOffer | None = None


class MemberReport(Message):
    """A member to the leader: the digest of its result, or who made it fail: ``culprit``, or perhaps ``other``."""

    kind: Literal["report"] = "report"
    digest: Annotated[str, Field(max_length=64)] = ""
    culprit: Index | None = None
    other: Index | None = None
    outcome: Outcome = Outcome.MERGED
    detail: Detail = ""


class GroupVerdict(Message):
    """The leader to all: use the result, because all have the same; or do not.

    ``culprits``: who made it fail. Not ``certain``: one of these lies, or a line between two of them is cut.
    """

    kind: Literal["verdict"] = "verdict"
    commit: bool
    culprits: Annotated[tuple[Index, ...], Field(max_length=3)] = ()
    certain: bool = True
    outcome: Outcome = Outcome.MERGED
    detail: Detail = ""


class GroupFailure(Exception):
    """A round of a group failed because of the member at place ``culprit``, or of the one at place ``other``."""

    def __init__(self, culprit: int, outcome: Outcome, detail: str, other: int | None = None) -> None:
        super().__init__(detail)
        self.report = MemberReport(culprit=culprit, other=other, outcome=outcome, detail=detail[:200])
