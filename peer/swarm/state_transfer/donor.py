"""A member gives its slow weights, momentum and step to a newcomer.

    newcomer: StateRequest   donor: StateHeader | Full | Decline, then parts, each with its digest   newcomer: Received

The donor sends a snapshot, so that its own training goes on. A newcomer that has lost its donor in mid-way says how
many parts it has already. Next stations: join.py and download.py, the newcomer's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from peer.logs import fields, get_logger
from peer.p2p.node import OPEN_TIMEOUT, Node
from peer.p2p.payload import fp32_parts, send_parts
from peer.p2p.stream import Message, Stream
from peer.rounds.lineage import NO_ROUNDS, Lineage
from peer.rounds.state import Root, State
from peer.rounds.vectors import Vector, parts
from peer.swarm.party import Decline, Party

log = get_logger("join")

PROTOCOL = "noloco/state/4"
TALK_TIMEOUT = 10.0  # seconds for one message
STALL = 10.0  # seconds without a byte
TRANSFER_LIMIT = 3600.0  # seconds for all vectors
CLIENTS = 2  # newcomers served at once


class StateRequest(Message):
    """May I have your state, from part ``have`` on? The parts of all vectors are numbered one after the other.

    Parts of a line of everyone's rounds (``lineage``) are of no use beside those of another line or round.
    """

    kind: Literal["state_request"] = "state_request"
    run: Annotated[str, Field(max_length=64)]
    config: Annotated[str, Field(max_length=64)]
    layout: Annotated[str, Field(max_length=64)]
    have: Annotated[int, Field(ge=0)] = 0
    lineage: Lineage = NO_ROUNDS
    round: Annotated[int, Field(ge=0)] = 0


class StateHeader(Message):
    """``vectors`` vectors of ``numel`` fp32 elements, φ and, where the method has one, the momentum.

    What follows begins with part ``first``.
    """

    kind: Literal["state_header"] = "state_header"
    step: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    phase_steps_done: Annotated[int, Field(ge=0)]
    lineage: Lineage
    root: Root = ""
    vectors: Annotated[int, Field(ge=1, le=4)]
    numel: Annotated[int, Field(ge=1)]
    first: Annotated[int, Field(ge=0)]


class Full(Message):
    """I serve as many newcomers as I can: ask me again in a while."""

    kind: Literal["full"] = "full"


class Received(Message):
    """All vectors arrived; the donor may close."""

    kind: Literal["received"] = "received"


REQUEST: TypeAdapter[StateRequest] = TypeAdapter(StateRequest)
ANSWER: TypeAdapter[StateHeader | Full | Decline] = TypeAdapter(
    Annotated[StateHeader | Full | Decline, Field(discriminator="kind")]
)
RECEIVED: TypeAdapter[Received] = TypeAdapter(Received)


class Donor:
    """Serves this peer's state to newcomers. ``snapshot`` returns copies and may be called from any thread."""

    def __init__(self, me: Party, layout: str, snapshot: Callable[[], State]) -> None:
        self._me, self._layout, self._snapshot = me, layout, snapshot
        self._clients = 0

    async def serve(self, stream: Stream) -> None:
        """One newcomer's stream, from request to acknowledgement."""
        try:
            request = await stream.receive(REQUEST, TALK_TIMEOUT)
            objection = self._objection(request)
            if objection is not None:
                await stream.send(objection, TALK_TIMEOUT)
                await stream.until_closed(TALK_TIMEOUT)
                return
            self._clients += 1
            try:
                async with asyncio.timeout(TRANSFER_LIMIT):
                    await self._give(stream, request)
            finally:
                self._clients -= 1
        finally:
            stream.close()

    async def _give(self, stream: Stream, request: StateRequest) -> None:
        state = await asyncio.to_thread(self._snapshot)
        numel = state.vectors[0].numel()
        each = len(list(parts(numel)))
        goes_on = state.lineage == request.lineage and (not state.lineage.digest or state.round == request.round)
        first = request.have if goes_on and request.have < each * len(state.vectors) else 0
        header = StateHeader(
            step=state.step,
            round=state.round,
            phase_steps_done=state.phase_steps_done,
            lineage=state.lineage,
            root=state.root,
            vectors=len(state.vectors),
            numel=numel,
            first=first,
        )
        await stream.send(header, TALK_TIMEOUT)
        for index, vector in enumerate(state.vectors):
            await send_parts(stream, fp32_parts(Vector(vector), max(0, first - index * each)), STALL)
        await stream.receive(RECEIVED, STALL)
        log.info("gave the state away: %s", fields(peer=stream.remote[-6:], step=state.step, first=first))

    def _objection(self, request: StateRequest) -> Full | Decline | None:
        if request.run != self._me.run:
            return Decline(reason="another run")
        if request.config != self._me.config:
            return Decline(reason="another configuration", run=self._me.canonical)
        if request.layout != self._layout:
            return Decline(reason="another model layout")
        if self._clients >= CLIENTS:
            return Full()
        return None


def start_serving(node: Node, donor: Donor) -> None:
    """Answer newcomers from now on."""
    node.call(node.serve(PROTOCOL, donor.serve), OPEN_TIMEOUT)
