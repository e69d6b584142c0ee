"""The member's side of a group of everyone: attend with the convener, say that one is ready, hear what it decides.

Previous station: convention.py. Next station: gathering.py. The other side: convening.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Refused, Stream, StreamLost
from peer.rounds.lineage import Lineage
from peer.rounds.types import Assembly, Group, Link, Seat
from peer.swarm.context import SwarmContext
from peer.swarm.grouping.leader import CATCH_UP
from peer.swarm.grouping.messages import (
    ANSWER,
    CONVENER_WORD,
    Admit,
    Attend,
    Behind,
    Follow,
    MemberAddress,
    Ready,
    Roster,
    Wait,
)
from peer.swarm.grouping.roster import PROTOCOL, TALK_TIMEOUT, Roll
from peer.swarm.messages import Decline

log = get_logger("gathering")

SILENCE = 10.0  # seconds without a word from the convener at a boundary
PERIOD = 0.25  # seconds between two looks at who leads
TRIES = 12  # conveners asked at a boundary, redirections and second thoughts included
HEARSAY = (SILENCE + 2 * TALK_TIMEOUT) / TRIES  # seconds, each time that one is named whom we know to be gone

Word = Wait | Follow | Behind | Roster | None


@dataclass(eq=False)
class Host:
    """The convener that has admitted this peer. ``words`` ends with ``None`` when the stream does."""

    stream: Stream
    seat: Seat
    words: asyncio.Queue[Word] = field(default_factory=asyncio.Queue)


class Attending:
    """Belongs to the network thread. ``lineage`` names the rounds in this peer's slow weights."""

    def __init__(self, footing: SwarmContext, roll: Roll, lineage: Callable[[], Lineage], patience: float) -> None:
        self._node, self._boundary = footing.node, footing.boundary
        self._roll, self._lineage, self._patience = roll, lineage, patience
        self._host: Host | None = None

    def admitted_by(self, leader: Seat) -> bool:
        """Has ``leader`` admitted this peer, for its next round?"""
        return self._host is not None and self._host.seat.peer_id == leader.peer_id

    def leave(self) -> None:
        """Attend with nobody."""
        if self._host is not None:
            self._host.stream.close()
            self._host = None

    async def attend(self, leader: Seat, round: int) -> str:
        """Open a stream to ``leader`` and be admitted. Returns why not; empty when it worked."""
        self.leave()
        attend = Attend(
            place=MemberAddress.of(self._roll.own_seat()),
            round=round,
            eta=self._boundary.eta() or 0.0,
        )
        stream: Stream | None = None
        try:
            stream = await self._node.open_to_member(leader.peer_id, PROTOCOL, leader.addresses)
            await stream.send(attend, TALK_TIMEOUT)
            answer = await stream.receive(ANSWER, TALK_TIMEOUT)
        except (TimeoutError, StreamLost, BadMessage) as error:
            self._roll.avoid(leader.peer_id)
            if isinstance(error, Refused):
                self._node.member.warn_of(leader.name, error)
            answer = Decline(reason=f"does not answer: {error}"[:200])
        if isinstance(answer, Admit) and stream is not None:
            self._host = Host(stream, leader)
            self._node.background(self._hear(self._host))
            return ""
        if stream is not None:
            stream.close()
        if isinstance(answer, Follow):
            self._roll.learn(answer.place.seat())
            if self._roll.avoided(answer.place.peer_id):
                await asyncio.sleep(HEARSAY)  # it will find that out too, and lead
            return f"{leader.name} follows another"
        reason = answer.reason if isinstance(answer, Decline) else ""
        await asyncio.sleep(PERIOD)
        return f"{leader.name}: {reason}"

    async def _hear(self, host: Host) -> None:
        """Pass on what the convener says; during the inner steps only that it does not lead any longer."""
        try:
            while True:
                word = await host.stream.receive(CONVENER_WORD, self._patience + CATCH_UP)
                host.words.put_nowait(word)
                if isinstance(word, Roster):
                    return
                if isinstance(word, Follow) and not self._boundary.here:
                    self._roll.learn(word.place.seat())
                    break
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("the convener is gone: %s", fields(peer=host.seat.name, reason=str(error)))
        host.words.put_nowait(None)
        if self._host is host and not self._boundary.here:
            self.leave()

    async def follow(self, leader: Seat, round: int, until: float) -> Group | str:
        """At the boundary: the group that ``leader`` calls, or why there is none. ``until`` is monotonic."""
        fresh = not self.admitted_by(leader)
        if fresh and (reason := await self.attend(leader, round)):
            return reason
        host = self._host
        assert host is not None
        try:
            await host.stream.send(Ready(lineage=self._lineage()), TALK_TIMEOUT)
            return await self._heed(host, round, until)
        except (TimeoutError, StreamLost) as error:
            self.leave()
            if fresh:  # else it may only have given us up as too late: ask it once more
                self._roll.avoid(leader.peer_id)
            return f"{leader.name} is gone: {str(error) or 'no word from it'}"

    async def _heed(self, host: Host, round: int, until: float) -> Group | str:
        """What the convener decides. Raises :class:`StreamLost` or ``TimeoutError`` when it is gone."""
        while True:
            async with asyncio.timeout(min(SILENCE, until - time.monotonic())):
                word = await host.words.get()
            match word:
                case Wait():
                    log.debug("waiting: %s", fields(whom=word.whom, seconds=word.seconds))
                case Follow():
                    self._roll.learn(word.place.seat())
                    return f"{host.seat.name} does not lead any longer"
                case Behind():
                    return Group(round, behind=word.donor.seat())
                case Roster():
                    self._host = None
                    return self._group(word, host, round)
                case None:
                    raise StreamLost("its stream ended")

    def _group(self, roster: Roster, host: Host, round: int) -> Group | str:
        seats = tuple(place.seat() for place in roster.places)
        ids = [seat.peer_id for seat in seats]
        if ids.count(self._node.peer_id) != 1 or ids[0] != host.seat.peer_id:
            host.stream.close()
            return f"{host.seat.name} called a group without this peer or itself"
        me = ids.index(self._node.peer_id)
        links = tuple(Link(seat.peer_id, seat.name) for index, seat in enumerate(seats) if index != me)
        return Group(round, links, Assembly(roster.token, seats, me, 0, {0: host.stream}))
