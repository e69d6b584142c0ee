"""The leader's side of a group of everyone: it admits members, waits for them and sends the roster."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import cycle

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Stream, StreamLost
from peer.rounds.progress import may_be_late
from peer.rounds.state import MAX_MEMBERS, Lineage, witnessed
from peer.rounds.transfer_rule import catch_up_limit
from peer.rounds.types import Assembly, Group, Link, Newest, Seat
from peer.swarm.context import SwarmContext
from peer.swarm.grouping.known_members import KnownMembers
from peer.swarm.grouping.messages import (
    JoinGroup,
    LeaderMessage,
    MemberReady,
    OtherLeader,
    OutOfDate,
    Roster,
    WaitFor,
    fitting,
)

log = get_logger("grouping")

LISTEN_SLACK = 2.0  # seconds for which a member's stream is read after the leader has given it up
AWAITED_IDS = 4 * MAX_MEMBERS  # that are remembered
KEEP_ALIVE = 1.0  # seconds between two messages to waiting members


@dataclass(eq=False)
class JoinedMember:
    """A member's stream and its last messages. ``until``: monotonic time at which the leader gives it up."""

    stream: Stream
    seat: Seat
    round: int
    until: float
    ready: MemberReady | None = None
    updated: bool = False  # it has been told once to take the group's weights
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        self.changed.set()
        self.stream.close()


class GroupLeader:
    """Belongs to the network thread. ``equal``: all members need the same lineage."""

    def __init__(self, context: SwarmContext, known: KnownMembers, *, equal: bool) -> None:
        self._context, self._known, self._equal = context, known, equal
        self._joined: dict[str, JoinedMember] = {}
        # Since the last round began, so that who joins again gains no time: from when on this peer has waited for each
        # id at its boundary, or until when the id had time to take weights; and who was told to.
        self._since = Newest[float](AWAITED_IDS)
        self._updated: set[str] = set()
        self._news = asyncio.Event()
        self._gathering = False
        self._tell_at = 0.0  # monotonic time of the next message to waiting members

    @property
    def present(self) -> set[str]:
        """Ids of the members that have joined; ``seats`` are theirs."""
        return set(self._joined)

    @property
    def seats(self) -> list[Seat]:
        return [member.seat for member in self._joined.values()]

    def full(self, peer_id: str) -> bool:
        """Is there no seat for it?"""
        return peer_id not in self._joined and len(self._joined) >= MAX_MEMBERS - 1

    def admit(self, stream: Stream, call: JoinGroup) -> None:
        """A member joins; if it has joined before, this stream replaces the earlier one."""
        earlier = self._joined.pop(stream.remote, None)
        if earlier is not None:
            earlier.leave()
        seat = replace(call.seat, peer_id=stream.remote)  # the authenticated id counts
        longest = self._context.boundary.longest_phase_seconds + self._known.patience(stream.remote)
        until = clock.monotonic() + min(call.eta + may_be_late(call.eta), longest)
        member = JoinedMember(stream, seat, call.round, until)
        self._joined[stream.remote] = member
        self._context.node.background(self._listen(member))
        self._news.set()

    def round_began(self) -> None:
        """Whoever has led it: those that join from now on join for the next one, and have their whole time."""
        self._since.clear()
        self._updated.clear()

    def close(self) -> None:
        """This peer leaves or pauses: close all streams, so that the members find another leader."""
        self.round_began()  # without it
        members, self._joined = self._joined, {}
        for member in members.values():
            member.leave()

    async def hand_over(self, leader: Seat) -> None:
        """Another peer leads: send all members there."""
        members, self._joined = self._joined, {}
        for member in members.values():
            await _tell(member, OtherLeader(seat=leader))
            member.leave()

    async def gather(self, round: int, until: float) -> Group:
        """Wait for the members, then send the roster. ``until``: monotonic time of the end of this peer's patience.

        Members come while it waits, and may have to take weights: all of that lasts for the longest wait for a member
        and once as long as catching up may take, as each member expects.
        """
        me, own = self._known.own_seat(), self._context.counters.lineage
        phase_seconds = self._context.boundary.progress.phase_seconds
        self._gathering, catch_up = True, catch_up_limit(phase_seconds)
        until = min(until, clock.monotonic() + self._known.patience(me.peer_id) + catch_up)
        while True:
            self._news.clear()
            late = self._awaited(round)
            if late and self._context.away:  # a roster without them may end in no round, and costs them one
                self.close()
                return Group(round, lost="asked to stop")
            if not late or clock.monotonic() >= until:
                reference, outdated_members = self._outdated(own)
                if self._must_update(own, reference):
                    self._gathering = False
                    self._context.node.background(self._keep_waiting(me, catch_up))
                    donor = random.choice(self._holders(reference))  # the next time another one, if this one fails
                    return Group(round, donor=donor)
                if not outdated_members:
                    return await self._send_roster(me, round, phase_seconds)
                await self._update(me, reference, outdated_members, catch_up)
                continue
            if self._due_to_tell():
                seconds = max(member.until for member in late) - clock.monotonic()
                await self._tell_to_wait(seconds, ", ".join(member.seat.name for member in late))
            wake_at = min(self._tell_at, *(member.until for member in late))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake_at - clock.monotonic())):
                    await self._news.wait()

    async def announce_delay(self, eta: float) -> None:
        """Tell members at the boundary how long this leader still trains, unless it is overdue or too late."""
        node = self._context.node
        if 0 < eta < self._known.patience(node.peer_id) and self._due_to_tell():
            await self._tell_to_wait(eta, node.member.name)

    # -- which members to wait for

    def _awaited(self, round: int) -> list[JoinedMember]:
        """The members to wait for. A member that is too late is dropped; one for a later round is not waited for,
        unless all are for later rounds: then this peer's own count is behind.
        """
        late, now = [], clock.monotonic()
        due = max(round, min((member.round for member in self._joined.values()), default=round))
        for peer_id, member in list(self._joined.items()):
            if member.stream.closed or member.stream.ended:  # nobody reads the stream of a member that is ready
                self._joined.pop(peer_id).leave()
                continue
            awaited = member.round <= due or member.updated  # it takes the group's count, too
            if awaited:
                since = self._since.setdefault(peer_id, now)
                member.until = min(member.until, since + self._known.patience(peer_id))
            if member.ready is None and member.until <= now:
                log.info("no longer waiting for a member: %s", fields(peer=member.seat.name))
                self._joined.pop(peer_id).leave()
                self._known.missed(peer_id)
            elif member.ready is None and awaited:
                late.append(member)
        return late

    async def _listen(self, member: JoinedMember) -> None:
        """Note a member's messages until its round begins or its stream ends."""
        try:
            while not member.stream.closed:
                patience = max(member.until - clock.monotonic(), 0.0) + LISTEN_SLACK
                member.ready = await member.stream.receive(MemberReady, patience)
                if member.stream.closed:  # it has left since the message came
                    return
                member.changed.clear()
                self._news.set()
                await member.changed.wait()  # it was told to catch up, is gone, or is in the roster
                if member.ready is not None:
                    return
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("has left the group: %s", fields(peer=member.seat.name, reason=str(error)))
            member.leave()
        finally:
            self._news.set()

    def _due_to_tell(self) -> bool:
        now = clock.monotonic()
        due = now >= self._tell_at
        self._tell_at = now + KEEP_ALIVE if due else self._tell_at
        return due

    async def _tell_to_wait(self, seconds: float, names: str) -> None:
        for member in list(self._joined.values()):
            if member.ready is not None:
                await _tell(member, WaitFor(seconds=max(0.0, seconds), names=names[:128]))

    async def _keep_waiting(self, me: Seat, seconds: float) -> None:
        """Send the others signs of life while this peer takes the group's weights."""
        until = clock.monotonic() + seconds
        while not self._gathering and clock.monotonic() < until:
            await self._tell_to_wait(until - clock.monotonic(), me.name)
            await asyncio.sleep(KEEP_ALIVE)

    # -- which slow weights count

    def _outdated(self, own: Lineage) -> tuple[Lineage, list[JoinedMember]]:
        """The lineage with the most contributions (of equals, the most frequent one) and the members that must take it.

        Contributions count before members: a swarm that comes back from checkpoints goes on from the newest one, and
        after a split many peers that began anew do not undo what a few have trained.

        Of unequal replicas, what more than a third of those that have trained say to have done counts first: they need
        nothing else of one another, so none of them takes other weights because of what up to a third say. A part of
        more than a third keeps its weights when a larger one has done less. One against two has no witness.
        """
        ready = [(it, it.ready.lineage) for it in self._joined.values() if it.ready is not None]
        held = Counter([own, *(lineage for _, lineage in ready)])
        done = {} if self._equal else {it: witnessed(it, list(held.elements())) for it in {it.digest for it in held}}
        reference = max(held, key=lambda it: (done.get(it.digest, 0), it.contributions, held[it], it.digest))
        return reference, [it for it, lineage in ready if self._must_update(lineage, reference)]

    def _must_update(self, lineage: Lineage, reference: Lineage) -> bool:
        """Unequal replicas need the same initial weights only: their builds may have drawn different ones. One that
        began with those of the others has missed nothing but rounds.
        """
        return lineage != reference if self._equal else lineage.digest != reference.digest

    def _holders(self, reference: Lineage) -> list[Seat]:
        """Who can give these weights; of unequal replicas those that have trained, if the ``reference`` has."""
        ready = [(it.seat, it.ready.lineage) for it in self._joined.values() if it.ready is not None]
        least = min(1, reference.contributions)
        return [seat for seat, it in ready if not self._must_update(it, reference) and it.contributions >= least]

    async def _update(self, me: Seat, reference: Lineage, outdated_members: list[JoinedMember], seconds: float) -> None:
        """Tell them to take the state of a member that has the right slow weights, within so many ``seconds``."""
        holders = [me, *self._holders(reference)]
        for member, donor in zip(outdated_members, cycle(holders), strict=False):
            if member.updated:  # and still has other weights
                self._joined.pop(member.seat.peer_id, None)
                member.leave()
                continue
            log.info("must take the group's weights: %s", fields(peer=member.seat.name, donor=donor.name))
            member.ready, member.until, member.updated = None, clock.monotonic() + seconds, True
            if member.seat.peer_id not in self._updated:
                self._updated.add(member.seat.peer_id)
                self._since[member.seat.peer_id] = member.until
            await _tell(member, OutOfDate(donor=donor))
            member.changed.set()

    # -- the roster

    async def _send_roster(self, me: Seat, round: int, phase_seconds: float) -> Group:
        members = [it for it in self._joined.values() if it.ready is not None]
        self._joined = {key: it for key, it in self._joined.items() if it.ready is None}
        members.sort(key=lambda member: member.seat.peer_id)
        seats = (me, *(member.seat for member in members))
        self.round_began()
        if not members:
            return Group(round)
        round = min(round, *(member.round for member in members))
        roster = fitting(Roster(token=secrets.token_hex(16), members=list(seats), round=round, phase=phase_seconds))
        for member in members:
            member.changed.set()
            await _tell(member, roster)
        controls = {index: member.stream for index, member in enumerate(members, 1)}
        links = tuple(Link(seat.peer_id, seat.name) for seat in seats[1:])
        return Group(round, links, Assembly(roster.token, seats, 0, controls, phase_seconds))


async def _tell(member: JoinedMember, message: LeaderMessage) -> None:
    try:
        await member.stream.send(message, MESSAGE_TIMEOUT)
    except (TimeoutError, StreamLost, BadMessage):
        member.leave()
