"""Coming together as one group, for methods that average over everyone: DiLoCo and decoupled momentum.

The live member with the smallest id convenes (convening.py); all others attend (attending.py). Views of who is there
differ for some seconds after somebody has come: a peer that is asked to convene and knows somebody smaller says so, and
one that convenes summons the members that do not attend. A convener that dies is missed by its stream, and the next one
leads.

The group waits for its slowest member: that is DiLoCo. It never waits for one that is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peer.p2p.node import OPEN_TIMEOUT
from peer.p2p.stream import Stream
from peer.rounds.lineage import Lineage
from peer.rounds.types import Group
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import LIFETIME
from peer.swarm.grouping.leader import CATCH_UP, SLACK, Convener
from peer.swarm.grouping.member import PERIOD, TRIES, Attending
from peer.swarm.grouping.messages import CALL, Admit, Attend, Follow, MemberAddress, Summon
from peer.swarm.grouping.roster import PROTOCOL, TALK_TIMEOUT, Roll
from peer.swarm.messages import Decline

LATE = 0.5  # of the time to the next boundary: who would have to wait for longer has missed the last one


class Gathering:
    """:meth:`group_for` is the loop's only call. ``lineage`` names the rounds in this peer's slow weights, ``equal``:
    it must be the same for all. ``patience``: seconds for which anybody is waited for at the most.
    """

    def __init__(self, footing: SwarmContext, patience: float, lineage: Callable[[], Lineage], *, equal: bool) -> None:
        self._node, self._boundary, self._stop = footing.node, footing.boundary, footing.stop
        self._patience, self._lineage, self._equal = patience, lineage, equal
        self._roll = Roll(footing)
        self._convener = Convener(footing.node.background, patience)
        self._attending = Attending(footing, self._roll, lineage, patience)
        self._round = 0

    # -- from the main thread

    def start(self, round: int) -> None:
        """Attend and convene, for the boundary that ends ``round``."""
        self._round = round
        self._node.call(self._node.serve_members(PROTOCOL, self._answer), OPEN_TIMEOUT)
        self._node.spawn(self._keep_attending())

    def group_for(self, round: int) -> Group:
        """Everyone who stands at this boundary too; waits for those who said that they come."""
        self._round = round
        return self._node.call(self._gather(), self._patience + CATCH_UP + 60.0)

    def avoid(self, peer_id: str, *, offence: bool) -> None:
        """Leave a member out for a while: a round has failed by it."""
        self._roll.avoid(peer_id, offence=offence)

    # -- on the network thread: the boundary

    async def _gather(self) -> Group:
        lost = "nobody could be met"
        until = time.monotonic() + self._patience + CATCH_UP  # nobody is waited for any longer
        with self._boundary.standing(self._boundary.number):
            for _ in range(TRIES):
                leader = self._roll.leader()
                if leader is None:
                    found = await self._lead()
                else:
                    found = await self._attending.follow(leader, self._round, until)
                if isinstance(found, Group):
                    break
                lost = found
            else:
                found = Group(self._round, lost=lost)
        if found.behind is None:
            self._round += 1  # from now on members attend for the next one
        for seat in found.assembly.seats if found.assembly else ():
            self._roll.learn(seat, LIFETIME + 2 * (self._boundary.phase or 0.0))
        return found

    async def _lead(self) -> Group | str:
        until = time.monotonic() + SLACK
        while (missing := self._roll.missing(self._convener.present)) and time.monotonic() < until:
            if self._stop.requested:
                break
            self._roll.summon(missing)
            await asyncio.sleep(0.05)
        seat, lineage = self._roll.own_seat(), self._lineage()
        group = await self._convener.gather(
            seat, lineage, self._round, equal=self._equal, stopped=lambda: self._stop.requested
        )
        if group.links or group.behind is not None or not (missing := self._roll.missing(set())):
            return group
        return Group(self._round, lost=f"{', '.join(seat.name for seat in missing)} did not come")

    # -- on the network thread: in the background

    async def _keep_attending(self) -> None:
        """During the inner steps: be where the group will be called."""
        while not self._stop.requested:
            await asyncio.sleep(PERIOD)
            eta = self._boundary.eta()
            if self._boundary.here or self._boundary.between or eta is None:
                continue
            leader = self._roll.leader()
            if leader is None:
                self._roll.summon(self._roll.missing(self._convener.present))
                await self._convener.come_later(self._roll.own_seat(), eta)
                continue
            if self._convener.present:
                await self._convener.dissolve(MemberAddress.of(leader))
            if not self._attending.admitted_by(leader):
                await self._attending.attend(leader, self._round)
        if not self._boundary.here:  # before the checkpoint is written: nobody shall wait for us
            self._attending.leave()
            self._convener.close()

    # -- on the network thread: answering

    async def _answer(self, stream: Stream) -> None:
        """A member attends, or a convener summons."""
        call = await stream.receive(CALL, TALK_TIMEOUT)
        if isinstance(call, Summon):
            if self._roll.welcome(stream.remote):
                self._roll.learn(call.place.model_copy(update={"peer_id": stream.remote}).seat())
            stream.close()
            return
        reply = self._reply(call, stream.remote)
        await stream.send(reply, TALK_TIMEOUT)
        if isinstance(reply, Admit):
            self._convener.admit(stream, call)
            return
        await stream.until_closed(TALK_TIMEOUT)
        stream.close()

    def _reply(self, attend: Attend, peer_id: str) -> Admit | Follow | Decline:
        if self._stop.requested:
            return Decline(reason="is leaving")
        if not self._roll.welcome(peer_id):
            return Decline(reason="a round has failed by you lately")
        leader = self._roll.leader()
        if leader is not None:
            return Follow(place=MemberAddress.of(leader))
        eta = self._boundary.eta()
        if eta is not None and attend.round < self._round and attend.eta < LATE * eta:
            return Decline(reason="came too late for this round")
        return Admit()
