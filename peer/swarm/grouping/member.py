"""The member's side of a group of everyone: join the leader's group, say that one is ready, hear what it decides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.deadline import Leaving, unless_away
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Refused, Stream, StreamLost
from peer.rounds.types import Assembly, Group, Link, Seat
from peer.swarm.context import Decline, SwarmContext
from peer.swarm.grouping.known_members import GATHER_PROTOCOL, KnownMembers
from peer.swarm.grouping.messages import (
    AWAY,
    JOIN_ANSWER,
    LEADER_MESSAGE,
    UNWELCOME,
    Admitted,
    JoinGroup,
    LeaderMessage,
    MemberReady,
    OtherLeader,
    OutOfDate,
    Roster,
    WaitFor,
)

log = get_logger("grouping")

LEADER_SILENCE = 10.0  # seconds without a message from the leader at a boundary
LEADER_PERIOD = 0.25  # seconds between two looks for the leader
MOST_MESSAGES = 32  # of a leader, before this peer's boundary
LEADER_TRIES = 12  # leaders asked at a boundary, redirections included
REDIRECT_PAUSE = (LEADER_SILENCE + 2 * MESSAGE_TIMEOUT) / LEADER_TRIES  # seconds, after a redirection to a lost leader


@dataclass(eq=False)
class LeaderStream:
    """The leader that has admitted this peer. ``None`` in ``messages`` marks the end of the stream."""

    stream: Stream
    seat: Seat
    waited: float = 0.0  # seconds at the boundary, as far as this peer has not stood still
    messages: asyncio.Queue[LeaderMessage | None] = field(default_factory=asyncio.Queue)


class GroupMember:
    """Belongs to the network thread."""

    def __init__(self, context: SwarmContext, known: KnownMembers) -> None:
        self._context, self._node = context, context.node
        self._boundary, self._counters = context.boundary, context.counters
        self._known, self._backoff = known, context.backoff
        self._leader: LeaderStream | None = None
        self._joining = asyncio.Lock()

    def admitted_by(self, leader: Seat) -> bool:
        """Has ``leader`` admitted this peer, for its next round?"""
        return self._leader is not None and self._leader.seat.peer_id == leader.peer_id

    def leave(self) -> None:
        """Leave the group that this peer has joined, if any."""
        if self._leader is not None:
            self._leader.stream.close()
            self._leader = None

    async def join(self, leader: Seat, round: int) -> str:
        """Be in the group of ``leader``. Returns why that failed; empty on success.

        A peer may come to its boundary while it joins. Of two streams to one leader, that one keeps the wrong one.
        """
        async with self._joining:
            return "" if self.admitted_by(leader) else await self._join(leader, round)

    async def _join(self, leader: Seat, round: int) -> str:
        self.leave()
        call = JoinGroup(seat=self._known.own_seat(), round=round, eta=self._boundary.eta() or 0.0)
        stream: Stream | None = None
        try:
            stream = await self._node.open_to_member(leader.peer_id, GATHER_PROTOCOL, leader.addresses)
            await stream.send(call, MESSAGE_TIMEOUT)
            answer = await stream.receive(JOIN_ANSWER, MESSAGE_TIMEOUT)
        except (TimeoutError, StreamLost, BadMessage) as error:
            self._known.avoid(leader.peer_id)
            if isinstance(error, Refused):
                self._node.member.warn_of(leader.name, error)
            answer = Decline(reason=f"does not answer: {error}"[:200])
        called_off = self._boundary.eta() is None
        if isinstance(answer, Admitted) and stream is not None and not called_off:
            self._leader = LeaderStream(stream, leader)
            self._node.background(self._hear(self._leader))
            return ""
        if stream is not None:
            stream.close()
        if isinstance(answer, OtherLeader):
            self._known.elected(answer.seat)
            if self._backoff.avoided(answer.seat.peer_id):
                await asyncio.sleep(REDIRECT_PAUSE)  # until the one that was asked finds that out too, and leads
            return f"{leader.name} follows another"
        reason = answer.reason if isinstance(answer, Decline) else ""
        if reason in (UNWELCOME, AWAY):
            self._known.avoid(leader.peer_id)  # until it calls: another one may lead those that it leaves out
        await asyncio.sleep(LEADER_PERIOD)
        return f"{leader.name}: {reason}"

    async def _hear(self, current: LeaderStream) -> None:
        """Queue the leader's messages. During the inner steps, leave when it does not lead any longer."""
        longest = self._known.longest(self._node.peer_id)
        try:
            while True:
                message = await current.stream.receive(LEADER_MESSAGE, longest)
                if current.messages.qsize() >= MOST_MESSAGES:
                    raise BadMessage("more messages than a leader sends")
                current.messages.put_nowait(message)
                if isinstance(message, Roster):
                    return
                if isinstance(message, OtherLeader) and not self._boundary.here:
                    self._known.elected(message.seat)
                    break
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("the leader is gone: %s", fields(peer=current.seat.name, reason=str(error)))
        current.messages.put_nowait(None)
        if self._leader is current and not self._boundary.here:
            self.leave()

    async def follow(self, leader: Seat, round: int, until: float) -> Group | str:
        """At the boundary: the group of ``leader``, or why there is none. ``until``: monotonic time."""
        fresh = not self.admitted_by(leader)
        if reason := await self.join(leader, round):
            return reason
        current = self._leader
        assert current is not None
        try:
            await current.stream.send(MemberReady(lineage=self._counters.lineage), MESSAGE_TIMEOUT)
            decision = await unless_away(self._decision(current, round, until), lambda: self._context.away)
            if isinstance(decision, str):
                self._note_cost(leader, current.waited)
            return decision
        except Leaving as error:
            self.leave()
            return Group(round, lost=str(error))
        except (TimeoutError, StreamLost) as error:
            self.leave()
            if not self._note_cost(leader, current.waited) and fresh:
                self._known.avoid(leader.peer_id)  # if not fresh it may only have dropped us as too late: ask it again
            return f"{leader.name} is gone: {str(error) or 'no message from it'}"

    def _note_cost(self, leader: Seat, waited: float) -> bool:
        """Leave out a leader that has given signs of life for long and formed no group; returns whether it has."""
        long = waited > self._known.longest(leader.peer_id) / 2
        if long:
            self._known.missed(leader.peer_id, waited)
        return long

    async def _decision(self, current: LeaderStream, round: int, until: float) -> Group | str:
        """The leader's decision. Raises :class:`StreamLost` or ``TimeoutError`` when the leader is gone."""
        due = min(until, clock.monotonic() + self._known.longest(current.seat.peer_id))
        while True:
            began, most = clock.monotonic(), min(LEADER_SILENCE, due - clock.monotonic())
            try:
                async with asyncio.timeout(most):
                    message = await current.messages.get()
            finally:
                current.waited += min(clock.monotonic() - began, max(0.0, most))
            match message:
                case WaitFor():
                    log.debug("waiting: %s", fields(whom=message.names, seconds=message.seconds))
                case OtherLeader():
                    self._known.elected(message.seat)
                    return f"{current.seat.name} does not lead any longer"
                case OutOfDate():
                    return Group(round, donor=message.donor)
                case Roster():
                    self._leader = None
                    return self._group(message, current, round)
                case None:
                    raise StreamLost("its stream ended")

    def _group(self, roster: Roster, current: LeaderStream, round: int) -> Group | str:
        seats = tuple(roster.members)
        ids = [seat.peer_id for seat in seats]
        if ids.count(self._node.peer_id) != 1 or ids[0] != current.seat.peer_id:
            current.stream.close()
            return f"{current.seat.name} sent a roster without this peer or itself"
        me = ids.index(self._node.peer_id)
        links = tuple(Link(seat.peer_id, seat.name) for index, seat in enumerate(seats) if index != me)
        phase_seconds = min(roster.phase, self._boundary.longest_phase_seconds)
        assembly = Assembly(roster.token, seats, me, {0: current.stream}, phase_seconds)
        return Group(min(round, roster.round), links, assembly)
