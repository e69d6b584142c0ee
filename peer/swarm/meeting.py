"""What two peers say to agree on a meeting, and the meeting itself.

Previous station: members.py. Next station: proposing.py, which decides whom to ask and what to answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from peer.config.digest import first_difference
from peer.logs import get_logger
from peer.streams import Message, Stream
from peer.swarm.latecomer import Root

log = get_logger("rendezvous")
T = TypeVar("T")
LAST_CALL = 0.4  # share of the inner phase that is left when all may be asked but the one met last
MET_LAST = 0.15  # when that one may be asked too
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Propose(Message):
    """Shall we meet at your next boundary and mine?"""

    kind: Literal["propose"] = "propose"
    name: Annotated[str, Field(max_length=64)]
    run: Annotated[str, Field(max_length=64)]
    config: Annotated[str, Field(max_length=64)]
    round: Annotated[int, Field(ge=0)]
    eta: Seconds  # until the proposer's boundary
    phase: Seconds  # length of the proposer's inner phase
    root: Root = ""


class Accept(Message):
    """Yes; both are committed now."""

    kind: Literal["accept"] = "accept"
    eta: Seconds
    root: Root = ""


class Decline(Message):
    """No. ``run`` is the decliner's configuration when that is the reason."""

    kind: Literal["decline"] = "decline"
    reason: Annotated[str, Field(max_length=200)]
    run: str | None = None


class Ready(Message):
    """I stand at the boundary."""

    kind: Literal["ready"] = "ready"


PROPOSAL: TypeAdapter[Propose] = TypeAdapter(Propose)
REPLY: TypeAdapter[Accept | Decline] = TypeAdapter(Annotated[Accept | Decline, Field(discriminator="kind")])
READY: TypeAdapter[Ready] = TypeAdapter(Ready)


@dataclass(frozen=True)
class Party:
    """Who this peer is, in a negotiation. ``canonical`` is the run's configuration as one text."""

    name: str
    run: str
    config: str
    canonical: str
    _warned: set[str] = field(default_factory=set)

    def warn_of_difference(self, name: str, theirs: str) -> None:
        """Say once for each peer in which key its run differs."""
        if name not in self._warned and len(self._warned) < 1000:
            self._warned.add(name)
            log.warning("peer %s trains another configuration: %s", name, first_difference(self.canonical, theirs))


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


def near(eta: float, their_eta: float, phase: float, their_phase: float, window: float) -> bool:
    """Are two boundaries within ``window`` of the shorter inner phase? All times in seconds."""
    return abs(eta - their_eta) <= window * min(phase, their_phase)


def askable(candidates: Sequence[T], left: float, opens: float) -> Sequence[T]:
    """Those of ``candidates`` that may be asked when ``left`` of the inner phase is left: the first from ``opens`` on,
    later ones later, all but the last from ``LAST_CALL`` on.

    Two peers that leave a swap together have near boundaries from then on; who was met last must not be asked before
    all those have been whose boundaries come near only now. (With 0.15 for all a fifth of the rounds found nobody on
    slow links; with 0.4 for all two peers of one speed met each other half again as often as by chance.)
    """
    count = len(candidates)
    last = [LAST_CALL] * (count - 1) + [MET_LAST if count > 1 else LAST_CALL]
    return [it for place, it in enumerate(candidates) if left <= max(opens * (1 - place / count), last[place])]
