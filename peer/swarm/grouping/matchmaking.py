"""Forms one group of all live peers, for methods that average over everyone: DiLoCo and decoupled momentum.

One member leads (leadership.py, leader.py); all others join its group (member.py). For some seconds after a newcomer
has come, not all peers know it. A peer that is asked to lead and follows another one says so, and a leader tells the
members that have not joined. When a leader dies its streams end, and the next one leads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from peer import clock
from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import MESSAGE_TIMEOUT, Stream
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Outcome
from peer.swarm.context import Decline, SwarmContext
from peer.swarm.directory.records import LIFETIME
from peer.swarm.grouping.known_members import GATHER_PROTOCOL, KnownMembers
from peer.swarm.grouping.leader import GroupLeader
from peer.swarm.grouping.member import LEADER_PERIOD, LEADER_TRIES, GroupMember
from peer.swarm.grouping.messages import (
    AWAY,
    GROUP_CALL,
    UNWELCOME,
    Admitted,
    JoinAnswer,
    JoinGroup,
    LeaderNotice,
    OtherLeader,
)
from peer.swarm.matchmaking import Matchmaking

JOIN_SECONDS = 2.0  # for which a leader at its boundary waits until the members that it knows have joined
JOIN_LOOK = 0.05  # seconds between two looks whether they have
# Seconds after the longest wait for others before the training thread gives up on the network thread: the last try may
# begin just before, and still joins a leader or sends the roster to each member.
GATHER_GRACE = 60.0
KNOWN_PHASES = 2.0  # inner phases, on top of a record's lifetime, for which a member of a round is known without one
TOO_LATE = 0.5  # a member whose boundary is nearer than this share of the time to our next one has missed our last


class GroupMatchmaking(Matchmaking):
    """One group. ``equal``: all members need the same lineage. ``patience``: seconds of the longest wait for a peer."""

    def __init__(self, context: SwarmContext, patience: float, *, equal: bool) -> None:
        self._context, self._node, self._boundary = context, context.node, context.boundary
        self._equal = equal
        self._known = KnownMembers(context, patience)
        self._leader = GroupLeader(context, self._known, equal=equal)
        self._member = GroupMember(context, self._known)
        self._round = 0  # of the next boundary, as others are told
        self._ahead = 0  # this peer's round less that of its last group; 0 if ``equal``
        self._leads = False  # at this boundary
        self._sent_by = ""  # id of the leader that says, at this boundary, that this peer has other weights
        self._declined_by = ""  # id of the one that was asked most often, when none let this peer into a group

    # -- from the training thread

    def start(self, round: int) -> None:
        self._round = round
        self._node.call(self._node.serve_members(GATHER_PROTOCOL, self._answer), OPEN_TIMEOUT)
        self._node.keep(self._keep_joined)

    def group_for(self, round: int, ended_phase_number: int | None = None) -> Group:
        """All members that are at this boundary too; waits for those that announced it."""
        assert ended_phase_number is None, "a group of everyone cannot overlap with inner steps"
        self._round = round - self._ahead
        return self._node.call(self._gather(), self._known.longest(self._node.peer_id) + GATHER_GRACE)

    def call_off(self, reason: str) -> None:
        self._node.spawn(self._leave())

    def avoid(self, peer_id: str, *, offence: bool, late: bool = False) -> None:
        self._known.made_fail(peer_id, offence=offence)

    def gave_no_state(self, peer_id: str, *, worse: bool = False) -> None:
        if worse:
            self._known.made_fail(peer_id, offence=False)  # its leader may have lied
        elif self._known.leader() is None:  # it has said so itself
            self._known.missed(peer_id)
        self._node.call(self._leave(), OPEN_TIMEOUT)

    def ended(self, group: Group, averaged: Averaged) -> None:
        """A leader that has sent this peer for weights in vain may have lied: it counts as that of a failed round."""
        leader = self._sent_by if group.assembly is None else group.assembly.seats[0].peer_id
        merged, declined = averaged.outcome is Outcome.MERGED, self._declined_by
        if len(averaged.culprits) > 1:
            self._known.suspected(averaged.culprits)
        self._known.leadership.ended(leader, averaged.culprits, merged=merged, declined=declined)

    # -- on the network thread: the boundary

    async def _gather(self) -> Group:
        with self._boundary.at_end_of(self._boundary.progress.phase_number):
            found = await self._found(clock.monotonic() + self._known.longest(self._node.peer_id))
        if found.assembly is not None and not self._equal:
            self._ahead = self._context.counters.round - found.round  # few take the count of another with weights
        if found.donor is None:
            self._round = self._context.counters.round - self._ahead + 1  # from now on members join for the next round
            self._leader.round_began()
        for seat in found.assembly.seats if found.assembly else ():
            self._known.learn(seat, LIFETIME + KNOWN_PHASES * self._boundary.progress.phase_seconds)
        return found

    async def _found(self, until: float) -> Group:
        """This peer's group, or the leader's; none after some tries. ``until``: monotonic end of all waits."""
        lost, asked = "no member could be met", Counter[str]()
        self._sent_by = self._declined_by = ""
        for _ in range(LEADER_TRIES):
            leader = self._known.leader()
            if leader is None:
                self._member.leave()
                found = await self._lead(until)
            else:
                asked[leader.peer_id] += 1
                found = await self._member.follow(leader, self._round, until)
            if isinstance(found, Group):
                if found.donor is not None and leader is not None:
                    self._sent_by = leader.peer_id
                return found
            lost = found
            if clock.monotonic() >= until:
                break
        self._declined_by = max(asked, key=lambda peer_id: asked[peer_id], default="")
        return Group(self._round, lost=lost)

    async def _lead(self, until: float) -> Group | str:
        """This peer's group, or why another try is needed."""
        joined_by = clock.monotonic() + JOIN_SECONDS
        while (missing := self._known.expected(self._leader.present)) and clock.monotonic() < joined_by:
            if self._context.away:
                break
            if (leader := self._known.leader()) is not None:
                return f"{leader.name} leads"
            self._known.notify(missing)
            await asyncio.sleep(JOIN_LOOK)
        self._leads = True
        try:
            group = await self._leader.gather(self._round, until)
        finally:
            self._leads = False
        alone = not (group.links or group.lost) and group.donor is None
        if alone and (awaited := self._known.expected(set())):
            group = Group(self._round, lost=f"{', '.join(seat.name for seat in awaited)} did not come")
        self._known.stayed_away(missing)  # the next round is not lost for their sake
        return group

    # -- on the network thread: in the background

    async def _keep_joined(self) -> None:
        """During the inner steps: be in the leader's group."""
        while True:
            if self._context.away and not self._boundary.here:  # before the checkpoint
                await self._leave()
            if self._context.stopping:
                return
            await asyncio.sleep(LEADER_PERIOD)
            eta = self._boundary.eta()
            if self._leads:  # one that could not reach this peer waits for its call
                self._known.notify(self._known.missing(self._leader.present))
            if self._boundary.here or self._boundary.between or eta is None or self._context.away:
                continue
            # it did not get the group's weights at its boundary
            self._round = max(self._round, self._context.counters.round - self._ahead)
            leader = self._known.leader()
            if leader is None:
                self._member.leave()
                if (leader := self._known.successor(self._leader.seats)) is not None:
                    self._known.elected(leader)
                    await self._leader.hand_over(leader)
                    continue
                self._known.notify(self._known.missing(self._leader.present))
                await self._leader.announce_delay(eta)
                continue
            if self._leader.present:
                await self._leader.hand_over(leader)
            await self._member.join(leader, self._round)

    async def _leave(self) -> None:
        """No member shall wait for this peer."""
        self._member.leave()
        self._leader.close()

    # -- on the network thread: answering

    async def _answer(self, stream: Stream) -> None:
        """A member joins, or a leader introduces itself."""
        call = await stream.receive(GROUP_CALL, MESSAGE_TIMEOUT)
        if isinstance(call, LeaderNotice):
            if self._context.backoff.welcome(stream.remote):
                self._known.claimed(replace(call.seat, peer_id=stream.remote), established=call.established)
            stream.close()
            return
        reply = self._reply(call, stream.remote)
        if not isinstance(reply, Admitted):
            await stream.send_last(reply, MESSAGE_TIMEOUT)
            return
        await stream.send(reply, MESSAGE_TIMEOUT)
        self._leader.admit(stream, call)

    def _reply(self, call: JoinGroup, peer_id: str) -> JoinAnswer:
        if self._context.away:
            return Decline(reason=AWAY)
        if not self._context.backoff.welcome(peer_id):
            return Decline(reason=UNWELCOME)
        leader = self._known.leader()
        if leader is not None:
            return OtherLeader(seat=leader)
        if self._leader.full(peer_id):
            return Decline(reason="the group is full")
        eta = self._boundary.eta()
        if eta is None and self._boundary.progress.step_seconds:  # another state comes, which may take long
            return Decline(reason=AWAY)
        if eta is not None and call.round < self._round and call.eta < TOO_LATE * eta:
            return Decline(reason="came too late for this round")
        return Admitted()
