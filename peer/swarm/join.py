"""A newcomer takes slow weights, momentum and step from a random member; every member gives its own away (donor.py).

It uses nothing that is not verified. When a donor leaves in mid-way, the next one goes on behind the last verified
part: replicas of NoLoCo are near each other, so parts of two of them are as good as a swap that broke off; for methods
whose replicas are equal both donors must stand behind the same round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.config_digest import first_difference
from peer.errors import RunError, UserError
from peer.logs import fields, get_logger
from peer.payload import receive_part
from peer.rounds import NO_ROUNDS, Lineage, Seat
from peer.streams import BadMessage, StreamLost
from peer.swarm.donor import ANSWER, PROTOCOL, STALL, TALK_TIMEOUT, TRANSFER_LIMIT, Received, State, StateRequest
from peer.swarm.meeting import Decline, Party
from peer.swarm.members import Members
from peer.swarm.node import Node
from peer.swarm.records import MemberRecord
from peer.vectors import parts

log = get_logger("join")

CHOOSY = 3  # donors that are asked whether they have our last rounds: each copies its state to answer
HEEDS = 0.2  # seconds until a stop is heard
PAUSE = 1.0  # seconds between two rounds of asking everybody
NEAR = 5  # rounds behind the furthest member: a state as good as its


@dataclass
class Taken:
    """What a newcomer has so far: ``have`` parts in ``room``, from donors of ``lineage`` behind ``round``."""

    room: Sequence[Tensor]
    have: int = 0
    lineage: Lineage = NO_ROUNDS
    round: int = 0


def take_state(
    node: Node,
    members: Members,
    me: Party,
    layout: str,
    room: Sequence[Tensor],
    timeout: float,
    *,
    above: int,
    reached: int = 0,
    among: Collection[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> State | None:
    """A verified state of a random one of the furthest members; ``None`` when nobody is beyond round ``above``, and
    when this peer is ``stopped`` meanwhile.

    ``room``: a flat fp32 host vector for each vector of the state, to be filled. ``reached``: see :func:`donors_of`.
    ``among``: ids of the only ones that may be asked.
    Raises :class:`UserError` when the swarm trains another configuration, :class:`RunError` when members are there
    and none of them gives its state within ``timeout`` seconds.
    """
    deadline, taken = time.monotonic() + timeout, Taken(room)
    while True:
        present = members.refresh_all()
        # a misconfigured stranger must not keep us from our own swarm, and our own mistake must be told
        ours = [it for it in present if it.config == me.config and (not among or it.peer_id in among)]
        donors = donors_of(ours, above, reached) if ours or among else present
        if not donors:
            return None
        random.shuffle(donors)
        reasons = []
        asked = deque((record, reached if place < CHOOSY else 0) for place, record in enumerate(donors))
        while asked:
            record, least = asked.popleft()
            work = _until_stopped(_take(node, record, me, layout, taken, least), stopped)
            try:
                return node.call(work, TRANSFER_LIMIT + TALK_TIMEOUT)
            except _Behind:
                asked.append((record, 0))  # its record is some seconds old, as are those of others
            except (StreamLost, BadMessage, TimeoutError, _Declined) as error:
                reasons.append(f"{record.name}: {str(error) or 'does not answer'}")
                log.warning("donor failed: %s", fields(peer=record.name, reason=str(error), parts=taken.have))
                members.forget(record.peer_id)
        if time.monotonic() > deadline:
            raise RunError(f"no member gave its weights ({'; '.join(reasons)[:300]}); try again, or look at their logs")
        if stopped():
            return None
        time.sleep(PAUSE)


async def _until_stopped(work: Coroutine[Any, Any, State], stopped: Callable[[], bool]) -> State | None:
    task = asyncio.ensure_future(work)
    try:
        while not stopped():
            if (await asyncio.wait({task}, timeout=HEEDS))[0]:
                return await task
        return None
    finally:
        task.cancel()


def donors_of(records: Sequence[MemberRecord], above: int, reached: int) -> list[MemberRecord]:
    """Members beyond round ``above`` that are near the furthest, so that newcomers spread over many.

    ``reached``: the last round of a peer that comes back, 0 for a newcomer. It need not do again what others have.
    Among three or more a single one is not the measure: who claims a round that nobody has would be everybody's donor.
    """
    rounds = sorted(record.round for record in records) or [0]
    furthest = rounds[-2] if len(rounds) > 2 else rounds[-1]
    least = max(above + 1, furthest - NEAR + 1, min(reached, furthest))
    return [record for record in records if record.round >= least]


class _Declined(Exception):
    pass


class _Behind(Exception):
    pass


def take_state_of(
    node: Node, donor: Seat, me: Party, layout: str, room: Sequence[Tensor], timeout: float
) -> State | None:
    """The verified state of one member, or ``None`` when it did not give it within ``timeout`` seconds."""
    try:
        return node.call(_take(node, donor, me, layout, Taken(room)), timeout)
    except (StreamLost, BadMessage, TimeoutError, RunError, _Declined) as error:
        log.warning("donor failed: %s", fields(peer=donor.name, reason=str(error)))
        return None


async def _take(node: Node, record: MemberRecord | Seat, me: Party, layout: str, taken: Taken, least: int = 0) -> State:
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
            raise _Declined(answer.reason)
        if (answer.vectors, answer.numel) != (len(taken.room), taken.room[0].numel()):
            raise BadMessage(f"a state of {answer.vectors} × {answer.numel} elements does not fit")
        if answer.first not in (0, taken.have):
            raise BadMessage(f"a state from part {answer.first} on does not go on behind {taken.have}")
        if answer.round < least:
            raise _Behind
        taken.have, taken.lineage, taken.round = answer.first, answer.lineage, answer.round
        pieces = [vector[start:stop] for vector in taken.room for start, stop in parts(vector.numel())]
        async with asyncio.timeout(TRANSFER_LIMIT):
            for piece in pieces[taken.have :]:
                if not await receive_part(stream, piece, STALL):
                    raise BadMessage("a part does not match its digest")
                if not await asyncio.to_thread(_finite, piece):
                    raise BadMessage("a part is not finite")
                taken.have += 1
        await stream.send(Received(), TALK_TIMEOUT)
        await stream.until_closed(1.0)
        what = fields(peer=record.name, step=answer.step, round=answer.round, first=answer.first)
        log.info("took the state of a member: %s", what)
        return State(answer.step, answer.round, taken.room, answer.lineage, answer.phase_steps_done, answer.root)
    finally:
        stream.close()


def _finite(piece: Tensor) -> bool:
    return bool(torch.isfinite(piece).all())
