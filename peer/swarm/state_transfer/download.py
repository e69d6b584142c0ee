"""Receives one donor's state part by part: each part is verified, and a verified part outlives its donor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer import clock
from peer.errors import UserError
from peer.logs import fields, get_logger
from peer.p2p.bulk.offer import agree, offer
from peer.p2p.deadline import in_time
from peer.p2p.greeting import MemberNode
from peer.p2p.payload import fp32_rooms, receive_parts
from peer.p2p.stream import CLOSE_SECONDS, BadMessage, Refused, Stream
from peer.rounds.state import NO_ROUNDS, Lineage, State
from peer.rounds.transfer_rule import CHECKS, copy_limit, state_limit
from peer.rounds.types import Seat
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer.donor import (
    STATE_ANSWER,
    STATE_LEAST,
    STATE_PROTOCOL,
    STATE_STALL,
    STATE_TIMEOUT,
    DonorFull,
    StateHeader,
    StateReceived,
    StateRequest,
)

log = get_logger("join")


@dataclass
class PartialState:
    """What a newcomer has so far: ``have`` parts in ``room``, from donors of ``lineage`` at ``round``."""

    room: Sequence[Tensor]
    have: int = 0
    lineage: Lineage = NO_ROUNDS
    round: int = 0

    @property
    def size(self) -> int:
        """Bytes of the whole state."""
        return sum(vector.nbytes for vector in self.room)

    def missing(self) -> list[memoryview]:
        """The places of the parts that have not come."""
        return [room for vector in self.room for room in fp32_rooms(vector)][self.have :]


class DonorBusy(Exception):
    """It serves as many newcomers as it can."""


class DonorBehind(Exception):
    """It does not have the requested rounds."""


async def download(
    node: MemberNode,
    record: MemberRecord | Seat,
    partial: PartialState,
    least: int = 0,
    patience: float = STATE_LEAST,
    most: tuple[float, float] = (math.inf, math.inf),
    within: float | None = None,
) -> State:
    """Fill ``partial.room`` from part ``partial.have`` on with the state of a donor at round ``least`` or later.

    ``most``: the round and the step that it can have reached. ``patience``: seconds that any state may take; in each
    quarter of these its rate is looked at. ``within``: seconds that this one may take, whatever its size.

    Raises :class:`UserError` when the donor trains another configuration, :class:`TooSlow`, :class:`DonorBusy`,
    :class:`DonorBehind`, and the errors of streams. Parts that came before are valid.
    """
    began = clock.monotonic()
    stream = await node.open_to_member(record.peer_id, STATE_PROTOCOL, record.addresses)
    try:
        direct = offer(stream, partial.size)
        request = StateRequest(have=partial.have, lineage=partial.lineage, round=partial.round, bulk=direct)
        await stream.send(request, STATE_TIMEOUT)
        answer = await stream.receive(STATE_ANSWER, copy_limit(partial.size, STATE_TIMEOUT))
        if isinstance(answer, DonorFull):
            raise DonorBusy("serves other newcomers, or has served this one often")
        _require_fitting(answer, partial, least, most)
        partial.have, partial.lineage, partial.round = answer.first, answer.lineage, answer.round
        size = sum(room.nbytes for room in partial.missing())
        await agree(stream, request.bulk, answer.bulk)
        until, limit = stream.all_received + size, state_limit(size, patience)
        if within is not None:
            limit = patience = began + within - clock.monotonic()
        receiving = _receive_parts(stream, partial)
        with stream.transferring():
            await in_time(receiving, lambda: {"receiving": until - stream.all_received}, limit, patience / CHECKS)
        await stream.send(StateReceived(), STATE_TIMEOUT)
        await stream.until_closed(CLOSE_SECONDS)
        got = fields(peer=record.name, step=answer.step, round=answer.round, first=answer.first)
        log.info("took the state of a member: %s", got)
        done, donor = answer.phase_steps_done, record.peer_id
        return State(answer.step, answer.round, partial.room, answer.lineage, done, answer.root, donor)
    except Refused as refused:
        if refused.run is None:
            raise
        what = f"{node.member.difference(refused)} (at peer {record.name})"
        raise UserError(f"this configuration is not the swarm's: {what}") from None
    finally:
        stream.close()


def _require_fitting(answer: StateHeader, partial: PartialState, least: int, most: tuple[float, float]) -> None:
    """Raises :class:`BadMessage` or :class:`DonorBehind` for a state that :func:`download` was not asked for."""
    if (answer.vectors, answer.numel) != (len(partial.room), partial.room[0].numel()):
        raise BadMessage(f"a state of {answer.vectors} × {answer.numel} elements does not fit")
    if answer.first not in (0, partial.have):
        raise BadMessage(f"a state from part {answer.first} on does not go on after {partial.have}")
    if answer.round < least:
        raise DonorBehind
    step = answer.step + answer.phase_steps_done
    if answer.round > most[0] or step > most[1] or not answer.lineage.fits(answer.round):
        raise BadMessage(f"its state is of round {answer.round}, step {step}: more than since its record")


async def _receive_parts(stream: Stream, partial: PartialState) -> None:
    async for _, part, _ in receive_parts(stream, partial.missing(), STATE_STALL):
        if not await clock.in_thread(_finite, part):
            raise BadMessage("a part is not finite")
        partial.have += 1


def _finite(part: memoryview) -> bool:
    return bool(torch.frombuffer(part, dtype=torch.float32).isfinite().all())
