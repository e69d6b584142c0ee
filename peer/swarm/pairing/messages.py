"""The messages by which two peers agree on a meeting.

proposer: Propose      other peer: Accept | Decline      at its boundary each side: PartnerReady
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.p2p.stream import Message
from peer.rounds.state import Root
from peer.swarm.context import Decline, Seconds


class Propose(Message):
    """Shall we meet at your next boundary and mine?"""

    kind: Literal["propose"] = "propose"
    name: Annotated[str, Field(max_length=64)]
    round: Annotated[int, Field(ge=0)]
    eta: Seconds  # until the proposer's boundary
    phase: Seconds  # length of the proposer's inner phase
    root: Root = ""


class Accept(Message):
    """Yes; both are committed now."""

    kind: Literal["accept"] = "accept"
    eta: Seconds
    root: Root = ""


class PartnerReady(Message):
    """I am at the boundary."""

    kind: Literal["ready"] = "ready"


PROPOSAL: TypeAdapter[Propose] = TypeAdapter(Propose)
PROPOSAL_ANSWER: TypeAdapter[Accept | Decline] = TypeAdapter(Annotated[Accept | Decline, Field(discriminator="kind")])
PARTNER_READY: TypeAdapter[PartnerReady] = TypeAdapter(PartnerReady)
