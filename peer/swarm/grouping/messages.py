"""The messages by which peers form one group, on a stream that each member opens to the leader during its inner steps
and that stays open until the round has ended.

    member: JoinGroup       leader: Admitted | OtherLeader | Decline
    member: MemberReady     leader: WaitFor … , then Roster | OutOfDate (take another's state, then be ready again)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.p2p.stream import MESSAGE_CAP, Message
from peer.rounds.state import MAX_MEMBERS, Lineage
from peer.rounds.types import Count, Seat
from peer.swarm.context import Decline, Seconds

UNWELCOME = "a round failed because of you"
AWAY = "is leaving, or is paused"


class JoinGroup(Message):
    """I want to be in your group at our next boundary."""

    kind: Literal["join_group"] = "join_group"
    seat: Seat
    round: Count
    eta: Seconds  # until the member's boundary


class LeaderNotice(Message):
    """I lead, as far as I know; join my group unless you know another leader."""

    kind: Literal["leader_notice"] = "leader_notice"
    seat: Seat
    established: bool  # my last round was one of a group


class Admitted(Message):
    """You are in the group; tell me when you are ready."""

    kind: Literal["admitted"] = "admitted"


class OtherLeader(Message):
    """Another peer leads."""

    kind: Literal["other_leader"] = "other_leader"
    seat: Seat


class MemberReady(Message):
    """I am at the boundary with slow weights of this lineage."""

    kind: Literal["member_ready"] = "member_ready"
    lineage: Lineage


class WaitFor(Message):
    """Still waiting for others; also the leader's sign of life."""

    kind: Literal["wait_for"] = "wait_for"
    seconds: Seconds  # at most
    names: Annotated[str, Field(max_length=128)]


class OutOfDate(Message):
    """Your slow weights are not the group's."""

    kind: Literal["out_of_date"] = "out_of_date"
    donor: Seat


class Roster(Message):
    """The group: its members in order. ``round``: the least of theirs. ``phase``: seconds of the leader's, 0 before its
    first step; they bound the round.
    """

    kind: Literal["roster"] = "roster"
    token: Annotated[str, Field(max_length=64)]
    members: Annotated[list[Seat], Field(min_length=2, max_length=MAX_MEMBERS)]
    round: Count
    phase: Seconds


def fitting(roster: Roster) -> Roster:
    """A roster that can be sent: if necessary with fewer addresses of each member, as the leader's node knows them."""
    for count in (4, 2, 1, 0):
        if len(roster.model_dump_json().encode()) <= MESSAGE_CAP:
            break
        members = [replace(seat, addresses=seat.addresses[:count]) for seat in roster.members]
        roster = roster.model_copy(update={"members": members})
    return roster


GroupCall = JoinGroup | LeaderNotice
JoinAnswer = Admitted | OtherLeader | Decline
LeaderMessage = WaitFor | OtherLeader | OutOfDate | Roster
GROUP_CALL: TypeAdapter[GroupCall] = TypeAdapter(Annotated[GroupCall, Field(discriminator="kind")])
JOIN_ANSWER: TypeAdapter[JoinAnswer] = TypeAdapter(Annotated[JoinAnswer, Field(discriminator="kind")])
LEADER_MESSAGE: TypeAdapter[LeaderMessage] = TypeAdapter(Annotated[LeaderMessage, Field(discriminator="kind")])
