"""One donor's state, part by part: nothing is used that is not verified, and what has come survives the donor.

Previous station: join.py, which chooses the donors. On the other side: donor.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.config.digest import first_difference
from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.p2p.node import Node
from peer.p2p.payload import fp32_rooms, receive_parts
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.lineage import NO_ROUNDS, Lineage
from peer.rounds.state import State
from peer.rounds.types import Seat
from peer.swarm.directory.records import MemberRecord
from peer.swarm.party import Decline, Party
from peer.swarm.state_transfer.donor import (
    ANSWER,
    PROTOCOL,
    STALL,
    TALK_TIMEOUT,
    TRANSFER_LIMIT,
    Full,
    Received,
    StateRequest,
)

log = get_logger("join")


@dataclass
class Taken:
    """What a newcomer has so far: ``have`` parts in ``room``, from donors of ``lineage`` behind ``round``."""

    room: Sequence[Tensor]
    have: int = 0
    lineage: Lineage = NO_ROUNDS
    round: int = 0


class Declined(Exception):
    """It will not give us its state."""


class Busy(Exception):
    """It serves as many newcomers as it can."""


class Behind(Exception):
    """It does not have the rounds that were asked for."""


class Slow(Exception):
    """A part took too long; those before it have come."""


def take_state_of(
    node: Node, donor: Seat, me: Party, layout: str, room: Sequence[Tensor], timeout: float
) -> State | None:
    """The verified state of one member, or ``None`` when it did not give it within ``timeout`` seconds."""
    try:
        return node.call(take(node, donor, me, layout, Taken(room)), timeout)
    except (StreamLost, BadMessage, TimeoutError, RunError, Declined, Busy) as error:
        log.warning("donor failed: %s", fields(peer=donor.name, reason=str(error)))
        return None


async def take(
    node: Node,
    record: MemberRecord | Seat,
    me: Party,
    layout: str,
    taken: Taken,
    least: int = 0,
    part_limit: float = TRANSFER_LIMIT,
) -> State:
    """Fill ``taken.room`` from part ``taken.have`` on, with the state of a donor behind round ``least`` or a later one.

    Raises :class:`UserError` when it trains another configuration, :class:`Slow` when a part took longer than
    ``part_limit`` seconds, :class:`Declined`, :class:`Busy`, :class:`Behind`, and what streams raise.
    """
    stream = await node.open(record.peer_id, PROTOCOL, record.addresses)
    try:
        request = StateRequest(
            run=me.run, config=me.config, layout=layout, have=taken.have, lineage=taken.lineage, round=taken.round
        )
        await stream.send(request, TALK_TIMEOUT)
        answer = await stream.receive(ANSWER, TALK_TIMEOUT)
        if isinstance(answer, Decline):
            if answer.run is not None:
                difference = first_difference(me.canonical, answer.run)
                raise UserError(f"this configuration is not the swarm's: {difference} (at peer {record.name})")
            raise Declined(answer.reason)
        if isinstance(answer, Full):
            raise Busy("serves other newcomers")
        if (answer.vectors, answer.numel) != (len(taken.room), taken.room[0].numel()):
            raise BadMessage(f"a state of {answer.vectors} × {answer.numel} elements does not fit")
        if answer.first not in (0, taken.have):
            raise BadMessage(f"a state from part {answer.first} on does not go on behind {taken.have}")
        if answer.round < least:
            raise Behind
        taken.have, taken.lineage, taken.round = answer.first, answer.lineage, answer.round
        async with asyncio.timeout(TRANSFER_LIMIT):
            await _take_parts(stream, taken, part_limit)
        await stream.send(Received(), TALK_TIMEOUT)
        await stream.until_closed(1.0)
        what = fields(peer=record.name, step=answer.step, round=answer.round, first=answer.first)
        log.info("took the state of a member: %s", what)
        done, donor = answer.phase_steps_done, record.peer_id
        return State(answer.step, answer.round, taken.room, answer.lineage, done, answer.root, donor)
    finally:
        stream.close()


async def _take_parts(stream: Stream, taken: Taken, part_limit: float) -> None:
    rooms = [room for vector in taken.room for room in fp32_rooms(vector)]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(part_limit) as clock:
            async for _, part, _ in receive_parts(stream, rooms[taken.have :], STALL):
                if not await asyncio.to_thread(_finite, part):
                    raise BadMessage("a part is not finite")
                taken.have += 1
                clock.reschedule(loop.time() + part_limit)
    except TimeoutError:
        if clock.expired():
            raise Slow from None
        raise


def _finite(part: memoryview) -> bool:
    return bool(torch.frombuffer(part, dtype=torch.float32).isfinite().all())
