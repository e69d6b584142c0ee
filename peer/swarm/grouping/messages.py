"""What peers say to come together as one group: members to the convener, and the convener to them.

The convener is the live member with the smallest id. While the inner steps run every other member opens a stream to
it (``Attend``), which stays open until the round is settled; at its boundary it says ``Ready``.

    member: Attend            convener: Admit | Follow (somebody smaller leads) | Decline
    member: Ready             convener: Wait … , then Roster | Behind (take the state of another, then be ready again)

Previous station: members.py. Next stations: attending.py (a member's side), convening.py (the convener's).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.p2p.stream import Message
from peer.rounds.lineage import Lineage
from peer.rounds.types import Seat
from peer.swarm.messages import Decline, Seconds

MAX_MEMBERS = 256
Text = Annotated[str, Field(max_length=128)]
Short = Annotated[str, Field(max_length=64)]


class MemberAddress(Message):
    """A :class:`peer.rounds.types.Seat` on the wire."""

    peer_id: Text
    name: Short
    addresses: Annotated[list[Text], Field(max_length=8)]

    @classmethod
    def of(cls, seat: Seat) -> MemberAddress:
        return cls(peer_id=seat.peer_id, name=seat.name, addresses=list(seat.addresses[:8]))

    def seat(self) -> Seat:
        return Seat(self.peer_id, self.name, tuple(self.addresses))


class Attend(Message):
    """I want to be in your group at our next boundary."""

    kind: Literal["attend"] = "attend"
    place: MemberAddress
    round: Annotated[int, Field(ge=0)]
    eta: Seconds  # until the member's boundary


class Summon(Message):
    """I lead, as far as I know; whoever knows nobody smaller shall attend."""

    kind: Literal["summon"] = "summon"
    place: MemberAddress


class Admit(Message):
    """You are in; say when you are ready."""

    kind: Literal["admit"] = "admit"


class Follow(Message):
    """Somebody else leads."""

    kind: Literal["follow"] = "follow"
    place: MemberAddress


class Ready(Message):
    """I stand at the boundary with slow weights of this lineage."""

    kind: Literal["ready"] = "ready"
    lineage: Lineage


class Wait(Message):
    """Still waiting for others; also the sign that the convener lives."""

    kind: Literal["wait"] = "wait"
    seconds: Seconds  # at most, as announced
    whom: Text


class Behind(Message):
    """Your slow weights are not the group's."""

    kind: Literal["behind"] = "behind"
    donor: MemberAddress


class Roster(Message):
    """The group: places in order."""

    kind: Literal["roster"] = "roster"
    token: Short
    places: Annotated[list[MemberAddress], Field(min_length=2, max_length=MAX_MEMBERS)]


CALL: TypeAdapter[Attend | Summon] = TypeAdapter(Annotated[Attend | Summon, Field(discriminator="kind")])
ANSWER: TypeAdapter[Admit | Follow | Decline] = TypeAdapter(
    Annotated[Admit | Follow | Decline, Field(discriminator="kind")]
)
MEMBER_WORD: TypeAdapter[Ready] = TypeAdapter(Ready)
CONVENER_WORD: TypeAdapter[Wait | Follow | Behind | Roster] = TypeAdapter(
    Annotated[Wait | Follow | Behind | Roster, Field(discriminator="kind")]
)
