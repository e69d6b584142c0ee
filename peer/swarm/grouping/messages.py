"""What peers say to come together as one group: members to the leader, and the leader to them.

The leader is the live member with the smallest id. While the inner steps run every other member opens a stream to it
(``JoinGroup``), which stays open until the round is settled; at its boundary it says ``MemberReady``.

    member: JoinGroup       leader: Admitted | OtherLeader (somebody smaller leads) | Decline
    member: MemberReady     leader: WaitFor … , then Roster | OutOfDate (take another's state, then be ready again)

Next stations: member.py (a member's side), leader.py (the leader's).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.p2p.stream import Message
from peer.rounds.lineage import Lineage
from peer.rounds.types import Seat
from peer.swarm.messages import Decline, Seconds

MAX_MEMBERS = 256


class JoinGroup(Message):
    """I want to be in your group at our next boundary."""

    kind: Literal["join_group"] = "join_group"
    seat: Seat
    round: Annotated[int, Field(ge=0)]
    eta: Seconds  # until the member's boundary


class LeaderNotice(Message):
    """I lead, as far as I know; join my group unless you know somebody with a smaller id."""

    kind: Literal["leader_notice"] = "leader_notice"
    seat: Seat


class Admitted(Message):
    """You are in; say when you are ready."""

    kind: Literal["admitted"] = "admitted"


class OtherLeader(Message):
    """Somebody else leads."""

    kind: Literal["other_leader"] = "other_leader"
    seat: Seat


class MemberReady(Message):
    """I stand at the boundary with slow weights of this lineage."""

    kind: Literal["member_ready"] = "member_ready"
    lineage: Lineage


class WaitFor(Message):
    """Still waiting for others; also the sign that the leader lives."""

    kind: Literal["wait_for"] = "wait_for"
    seconds: Seconds  # at most, as announced
    names: Annotated[str, Field(max_length=128)]


class OutOfDate(Message):
    """Your slow weights are not the group's."""

    kind: Literal["out_of_date"] = "out_of_date"
    donor: Seat


class Roster(Message):
    """The group: its members in order."""

    kind: Literal["roster"] = "roster"
    token: Annotated[str, Field(max_length=64)]
    members: Annotated[list[Seat], Field(min_length=2, max_length=MAX_MEMBERS)]


GROUP_CALL: TypeAdapter[JoinGroup | LeaderNotice] = TypeAdapter(
    Annotated[JoinGroup | LeaderNotice, Field(discriminator="kind")]
)
JOIN_ANSWER: TypeAdapter[Admitted | OtherLeader | Decline] = TypeAdapter(
    Annotated[Admitted | OtherLeader | Decline, Field(discriminator="kind")]
)
MEMBER_READY: TypeAdapter[MemberReady] = TypeAdapter(MemberReady)
LEADER_MESSAGE: TypeAdapter[WaitFor | OtherLeader | OutOfDate | Roster] = TypeAdapter(
    Annotated[WaitFor | OtherLeader | OutOfDate | Roster, Field(discriminator="kind")]
)
