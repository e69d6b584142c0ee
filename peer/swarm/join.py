"""A newcomer takes slow weights, momentum and step from a random member; every member gives its own away.

    newcomer: StateRequest   donor: StateHeader | Decline, then each vector with its digest   newcomer: Received

The donor sends a snapshot, so that its own training goes on. The newcomer uses nothing that is not verified, and
asks another donor when one leaves.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from peer.config_digest import first_difference
from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.payload import receive_payload, send_payload
from peer.rounds import Seat
from peer.streams import BadMessage, Message, Stream, StreamLost
from peer.swarm.meeting import Decline, Party
from peer.swarm.members import Members
from peer.swarm.node import OPEN_TIMEOUT, Node
from peer.swarm.records import MemberRecord
from peer.vectors import Vector

log = get_logger("join")

PROTOCOL = "noloco/state/1"
TALK_TIMEOUT = 10.0  # seconds for one message
STALL = 10.0  # seconds without a byte
TRANSFER_LIMIT = 3600.0  # seconds for all vectors
CLIENTS = 2  # newcomers served at once
PAUSE = 1.0  # seconds between two rounds of asking everybody


class StateRequest(Message):
    """May I have your state?"""

    kind: Literal["state_request"] = "state_request"
    run: Annotated[str, Field(max_length=64)]
    config: Annotated[str, Field(max_length=64)]
    layout: Annotated[str, Field(max_length=64)]


class StateHeader(Message):
    """``vectors`` payloads of ``numel`` fp32 elements follow: φ and, where the method has one, the momentum."""

    kind: Literal["state_header"] = "state_header"
    step: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    phase_steps_done: Annotated[int, Field(ge=0)]
    lineage: Annotated[str, Field(max_length=64)]
    vectors: Annotated[int, Field(ge=1, le=4)]
    numel: Annotated[int, Field(ge=1)]


class Received(Message):
    """All vectors arrived; the donor may close."""

    kind: Literal["received"] = "received"


REQUEST: TypeAdapter[StateRequest] = TypeAdapter(StateRequest)
ANSWER: TypeAdapter[StateHeader | Decline] = TypeAdapter(Annotated[StateHeader | Decline, Field(discriminator="kind")])
RECEIVED: TypeAdapter[Received] = TypeAdapter(Received)


@dataclass(frozen=True)
class State:
    """A peer's outer state at a boundary, ``phase_steps_done`` inner steps ago; ``vectors``: flat fp32, host."""

    step: int
    round: int
    vectors: Sequence[Tensor]
    lineage: str = ""
    phase_steps_done: int = 0


class Donor:
    """Serves this peer's state to newcomers. ``snapshot`` returns copies and may be called from any thread."""

    def __init__(self, me: Party, layout: str, snapshot: Callable[[], State]) -> None:
        self._me, self._layout, self._snapshot = me, layout, snapshot
        self._clients = 0

    async def serve(self, stream: Stream) -> None:
        """One newcomer's stream, from request to acknowledgement."""
        try:
            request = await stream.receive(REQUEST, TALK_TIMEOUT)
            decline = self._objection(request)
            if decline is not None:
                await stream.send(decline, TALK_TIMEOUT)
                await stream.until_closed(TALK_TIMEOUT)
                return
            self._clients += 1
            try:
                async with asyncio.timeout(TRANSFER_LIMIT):
                    await self._give(stream)
            finally:
                self._clients -= 1
        finally:
            stream.close()

    async def _give(self, stream: Stream) -> None:
        state = await asyncio.to_thread(self._snapshot)
        numel = state.vectors[0].numel()
        header = StateHeader(
            step=state.step,
            round=state.round,
            phase_steps_done=state.phase_steps_done,
            lineage=state.lineage,
            vectors=len(state.vectors),
            numel=numel,
        )
        await stream.send(header, TALK_TIMEOUT)
        for vector in state.vectors:
            await send_payload(stream, Vector(vector), STALL)
        await stream.receive(RECEIVED, STALL)
        log.info("gave the state to a newcomer: %s", fields(peer=stream.remote[-6:], step=state.step))

    def _objection(self, request: StateRequest) -> Decline | None:
        if request.run != self._me.run:
            return Decline(reason="another run")
        if request.config != self._me.config:
            return Decline(reason="another configuration", run=self._me.canonical)
        if request.layout != self._layout:
            return Decline(reason="another model layout")
        if self._clients >= CLIENTS:
            return Decline(reason="serves other newcomers")
        return None


def take_state(
    node: Node, members: Members, me: Party, layout: str, room: Sequence[Tensor], timeout: float
) -> State | None:
    """A verified state of a random member, or ``None`` when nobody is there or nobody has finished a round.

    ``room``: a flat fp32 host vector for each vector of the state, to be filled. Raises :class:`UserError` when the
    swarm trains another configuration, :class:`RunError` when members are there and none of them gives its state
    within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        present = members.refresh_all()
        # a misconfigured stranger must not keep us from our own swarm, and our own mistake must be told
        donors = [record for record in present if record.config == me.config] or present
        if not any(record.round > 0 or record.config != me.config for record in donors):
            return None
        random.shuffle(donors)
        reasons = []
        for record in donors:
            try:
                return node.call(_take(node, record, me, layout, room), TRANSFER_LIMIT + TALK_TIMEOUT)
            except (StreamLost, BadMessage, TimeoutError, _Declined) as error:
                reasons.append(f"{record.name}: {str(error) or 'does not answer'}")
                log.warning("donor failed: %s", fields(peer=record.name, reason=str(error)))
                members.forget(record.peer_id)
        if time.monotonic() > deadline:
            raise RunError(f"no member gave its weights ({'; '.join(reasons)[:300]}); try again, or look at their logs")
        time.sleep(PAUSE)


class _Declined(Exception):
    pass


def take_state_of(
    node: Node, donor: Seat, me: Party, layout: str, room: Sequence[Tensor], timeout: float
) -> State | None:
    """The verified state of one member, or ``None`` when it did not give it within ``timeout`` seconds."""
    try:
        return node.call(_take(node, donor, me, layout, room), timeout)
    except (StreamLost, BadMessage, TimeoutError, RunError, _Declined) as error:
        log.warning("donor failed: %s", fields(peer=donor.name, reason=str(error)))
        return None


async def _take(node: Node, record: MemberRecord | Seat, me: Party, layout: str, vectors: Sequence[Tensor]) -> State:
    stream = await node.open(record.peer_id, PROTOCOL, record.addresses)
    try:
        await stream.send(StateRequest(run=me.run, config=me.config, layout=layout), TALK_TIMEOUT)
        answer = await stream.receive(ANSWER, TALK_TIMEOUT)
        if isinstance(answer, Decline):
            if answer.run is not None:
                difference = first_difference(me.canonical, answer.run)
                raise UserError(f"this configuration is not the swarm's: {difference} (at peer {record.name})")
            raise _Declined(answer.reason)
        if (answer.vectors, answer.numel) != (len(vectors), vectors[0].numel()):
            raise BadMessage(f"a state of {answer.vectors} × {answer.numel} elements does not fit")
        async with asyncio.timeout(TRANSFER_LIMIT):
            for vector in vectors:
                if not await receive_payload(stream, vector, STALL):
                    raise BadMessage("a vector does not match its digest")
                if not await asyncio.to_thread(_finite, vector):
                    raise BadMessage("a vector is not finite")
        await stream.send(Received(), TALK_TIMEOUT)
        await stream.until_closed(1.0)
        log.info("took the state of a member: %s", fields(peer=record.name, step=answer.step, round=answer.round))
        return State(answer.step, answer.round, vectors, answer.lineage, answer.phase_steps_done)
    finally:
        stream.close()


def _finite(vector: Tensor) -> bool:
    return bool(torch.isfinite(vector).all())


def start_serving(node: Node, donor: Donor) -> None:
    """Answer newcomers from now on."""
    node.call(node.serve(PROTOCOL, donor.serve), OPEN_TIMEOUT)
