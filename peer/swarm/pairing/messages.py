"""What two peers say to agree on a meeting, and the meeting itself.

Previous station: members.py. Next station: proposing.py, which decides whom to ask and what to answer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.p2p.stream import Message, Stream
from peer.rounds.state import Root
from peer.swarm.messages import Decline, Seconds


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


class Ready(Message):
    """I stand at the boundary."""

    kind: Literal["ready"] = "ready"


PROPOSAL: TypeAdapter[Propose] = TypeAdapter(Propose)
REPLY: TypeAdapter[Accept | Decline] = TypeAdapter(Annotated[Accept | Decline, Field(discriminator="kind")])
READY: TypeAdapter[Ready] = TypeAdapter(Ready)


@dataclass(eq=False)
class Meeting:
    """A stream that both sides keep open until they stand at their boundaries."""

    stream: Stream
    name: str
    eta: float  # seconds until the partner's boundary, as announced at ``agreed``
    root: str = ""
    agreed: float = field(default_factory=time.monotonic)
    word: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def their_eta(self) -> float:
        """Seconds until the partner's boundary by its own announcement."""
        return max(0.0, self.eta - (time.monotonic() - self.agreed))

    def settle(self, came: bool) -> None:
        """The partner is ready, or the meeting is off."""
        if not self.word.done():
            self.word.set_result(came)
