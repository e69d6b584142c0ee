"""The leader's side of a group of everyone: who has come, whom to wait for and how long, who is in the roster.

Nobody is waited for longer than it announced (half as much again and some slack), and a member whose stream ends is
out at once. Previous station: messages.py. Next station: gathering.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.lineage import Lineage
from peer.rounds.types import Assembly, Group, Link, Seat
from peer.swarm.grouping.messages import (
    MEMBER_READY,
    JoinGroup,
    MemberReady,
    OtherLeader,
    OutOfDate,
    Roster,
    WaitFor,
)

log = get_logger("gathering")

MEMBER_SLACK = 2.0  # seconds that a member may come late, on top of half the time it announced
LEADER_TIMEOUT = 5.0
KEEP_ALIVE = 1.0  # seconds between two messages to those who wait
CATCH_UP_TIMEOUT = 60.0  # seconds for a member to take the state of another


@dataclass(eq=False)
class JoinedMember:
    """A member's stream and what it has said. ``until`` is monotonic: when it is given up."""

    stream: Stream
    seat: Seat
    round: int
    until: float
    ready: MemberReady | None = None
    updated: bool = False  # it was sent for the group's weights, once
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        self.gone = True
        self.changed.set()
        self.stream.close()


class GroupLeader:
    """Everything runs on the network thread."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], None], patience: float) -> None:
        self._spawn, self._patience = spawn, patience
        self._joined: dict[str, JoinedMember] = {}
        self._news = asyncio.Event()
        self._gathering = False
        self._told = 0.0  # monotonic: when those who wait were told last

    @property
    def present(self) -> set[str]:
        """Ids of the members that have joined."""
        return set(self._joined)

    def admit(self, stream: Stream, call: JoinGroup) -> None:
        """A member has come; one that comes again replaces its earlier stream."""
        earlier = self._joined.pop(stream.remote, None)
        if earlier is not None:
            earlier.leave()
        seat = replace(call.seat, peer_id=stream.remote)  # what is authenticated counts
        wait = min(1.5 * call.eta + MEMBER_SLACK, self._patience)
        member = JoinedMember(stream, seat, call.round, time.monotonic() + wait)
        self._joined[stream.remote] = member
        self._spawn(self._listen(member))
        self._news.set()

    def close(self) -> None:
        """This peer leaves: the members find another leader."""
        for member in self._joined.values():
            member.leave()

    async def hand_over(self, leader: Seat) -> None:
        """Somebody else leads: send everybody there."""
        members, self._joined = self._joined, {}
        for member in members.values():
            await _tell(member, OtherLeader(seat=leader))
            member.leave()

    async def gather(self, me: Seat, own: Lineage, round: int, *, equal: bool, stopped: Callable[[], bool]) -> Group:
        """Wait for the members, then send the roster. ``equal``: all must have the same lineage."""
        self._gathering = True
        while True:
            self._news.clear()
            late = self._awaited(round)
            if not late or stopped():
                outdated = self._outdated(own) if equal else None
                if outdated is None:
                    return await self._send_roster(me, round)
                reference, outdated_members = outdated
                if own != reference:
                    self._gathering = False
                    self._spawn(self._keep_waiting(me))
                    return Group(round, behind=self._holder(reference))
                await self._update(me, outdated_members)
                continue
            if self._due_to_tell():
                seconds = max(member.until for member in late) - time.monotonic()
                await self._tell_to_wait(seconds, ", ".join(member.seat.name for member in late))
            soonest = min(member.until for member in late)
            await _within(self._news.wait(), min(KEEP_ALIVE, max(0.0, soonest - time.monotonic())))

    async def announce_delay(self, me: Seat, eta: float) -> None:
        """Others stand at the boundary and this peer, which leads, still trains: they hear how long it will take.

        Not when it is overdue or too far off: then they go on without it.
        """
        if 0 < eta < self._patience and self._due_to_tell():
            await self._tell_to_wait(eta, me.name)

    # -- who is here

    def _awaited(self, round: int) -> list[JoinedMember]:
        """Those to wait for. Who did not come in time is dropped; a member for a later round is not waited for,
        unless all do: then it is our own count that is behind.
        """
        late = []
        due = max(round, min((member.round for member in self._joined.values()), default=round))
        for peer_id, member in list(self._joined.items()):
            if member.gone:
                self._joined.pop(peer_id)
            elif member.ready is None and member.until < time.monotonic():
                log.info("not waited for any longer: %s", fields(peer=member.seat.name))
                self._joined.pop(peer_id).leave()
            elif member.ready is None and member.round <= due:
                late.append(member)
        return late

    async def _listen(self, member: JoinedMember) -> None:
        """Note what a member says until its round begins or its stream ends."""
        try:
            while not member.gone:
                patience = max(member.until - time.monotonic(), 0.0) + MEMBER_SLACK
                member.ready = await member.stream.receive(MEMBER_READY, patience)
                member.changed.clear()
                self._news.set()
                await member.changed.wait()  # told to catch up, or gone, or in the roster
                if member.ready is not None:
                    return
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("has left the group: %s", fields(peer=member.seat.name, reason=str(error)))
            member.leave()
        finally:
            self._news.set()

    def _due_to_tell(self) -> bool:
        due = time.monotonic() - self._told > KEEP_ALIVE
        self._told = time.monotonic() if due else self._told
        return due

    async def _tell_to_wait(self, seconds: float, names: str) -> None:
        for member in list(self._joined.values()):
            if member.ready is not None:
                await _tell(member, WaitFor(seconds=max(0.0, seconds), names=names[:128]))

    async def _keep_waiting(self, me: Seat) -> None:
        """While this peer takes the group's weights itself, the others hear that it lives."""
        until = time.monotonic() + CATCH_UP_TIMEOUT
        while not self._gathering and time.monotonic() < until:
            await self._tell_to_wait(until - time.monotonic(), me.name)
            await asyncio.sleep(KEEP_ALIVE)

    # -- whose slow weights count

    def _outdated(self, own: Lineage) -> tuple[Lineage, list[JoinedMember]] | None:
        """The lineage with the most work in it (of equals, the one that most have) and who has another one.

        Most work and not most members: a swarm that comes back from checkpoints goes on from the newest one, and many
        who have begun anew on the other side of a split do not undo what few have trained.
        """
        held = Counter([own, *(it.ready.lineage for it in self._joined.values() if it.ready is not None)])
        reference = max(held, key=lambda lineage: (lineage.contributions, held[lineage], lineage.digest))
        outdated_members = [it for it in self._joined.values() if it.ready and it.ready.lineage != reference]
        return (reference, outdated_members) if outdated_members or own != reference else None

    def _holder(self, lineage: Lineage) -> Seat:
        return next(it.seat for it in self._joined.values() if it.ready and it.ready.lineage == lineage)

    async def _update(self, donor: Seat, outdated_members: list[JoinedMember]) -> None:
        """Let them take the state of a member whose slow weights are right, and wait for them."""
        for member in outdated_members:
            if member.updated:  # and has other weights all the same
                self._joined.pop(member.seat.peer_id, None)
                member.leave()
                continue
            log.info("sent for the group's weights: %s", fields(peer=member.seat.name, donor=donor.name))
            member.ready, member.until, member.updated = None, time.monotonic() + CATCH_UP_TIMEOUT, True
            await _tell(member, OutOfDate(donor=donor))
            member.changed.set()

    # -- the roster

    async def _send_roster(self, me: Seat, round: int) -> Group:
        members = [it for it in self._joined.values() if it.ready is not None and not it.gone]
        self._joined = {key: it for key, it in self._joined.items() if it.ready is None and not it.gone}
        members.sort(key=lambda member: member.seat.peer_id)
        seats = (me, *(member.seat for member in members))
        if not members:
            return Group(round)
        roster = Roster(token=secrets.token_hex(16), members=list(seats))
        for member in members:
            member.changed.set()
            await _tell(member, roster)
        controls = {index: member.stream for index, member in enumerate(members, 1)}
        links = tuple(Link(seat.peer_id, seat.name) for seat in seats[1:])
        return Group(round, links, Assembly(roster.token, seats, 0, 0, controls))


async def _tell(member: JoinedMember, message: WaitFor | OtherLeader | OutOfDate | Roster) -> None:
    try:
        await member.stream.send(message, LEADER_TIMEOUT)
    except (TimeoutError, StreamLost):
        member.leave()


async def _within(work: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
