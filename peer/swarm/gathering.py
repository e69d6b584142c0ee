"""Coming together as one group, for methods that average over everyone: DiLoCo and decoupled momentum.

The live member with the smallest id convenes (convening.py); all others attend. Views of who is there differ for some
seconds after somebody has come: a peer that is asked to convene and knows somebody smaller says so, and one that
convenes summons the members that do not attend. A convener that dies is missed by its stream, and the next one leads.

The group waits for its slowest member: that is DiLoCo. It never waits for one that is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.config import Rendezvous as Settings
from peer.logs import fields, get_logger
from peer.progress import Progress, Stop
from peer.rounds import Assembly, Group, Lineage, Link, Seat
from peer.streams import BadMessage, Stream, StreamLost
from peer.swarm.boundary import Boundary
from peer.swarm.convening import CATCH_UP, SLACK, Convener
from peer.swarm.convention import (
    ANSWER,
    CALL,
    CONVENER_WORD,
    Admit,
    Attend,
    Behind,
    Follow,
    Place,
    Ready,
    Roster,
    Summon,
    Wait,
)
from peer.swarm.meeting import Decline, Party
from peer.swarm.members import Members
from peer.swarm.node import OPEN_TIMEOUT, Node
from peer.swarm.records import LIFETIME
from peer.swarm.roll import PROTOCOL, TALK_TIMEOUT, Roll

log = get_logger("gathering")

SILENCE = 10.0  # seconds without a word from the convener at a boundary
PERIOD = 0.25  # seconds between two looks at who leads
LATE = 0.5  # of the time to the next boundary: who would have to wait for longer has missed the last one
TRIES = 12  # conveners asked at a boundary, redirections and second thoughts included
HEARSAY = (SILENCE + 2 * TALK_TIMEOUT) / TRIES  # seconds, each time that one is named whom we know to be gone

Word = Wait | Follow | Behind | Roster | None


@dataclass(eq=False)
class Host:
    """The convener that has admitted this peer. ``words`` ends with ``None`` when the stream does."""

    stream: Stream
    seat: Seat
    words: asyncio.Queue[Word] = field(default_factory=asyncio.Queue)


class Gathering:
    """:meth:`group_for` is the loop's only call. ``lineage`` names the rounds in this peer's slow weights."""

    def __init__(
        self,
        node: Node,
        members: Members,
        progress: Progress,
        stop: Stop,
        settings: Settings,
        me: Party,
        *,
        lineage: Callable[[], Lineage],
        equal: bool,
    ) -> None:
        self._node, self._members, self._stop, self._me = node, members, stop, me
        self._lineage, self._equal, self._patience = lineage, equal, settings.patience
        self._boundary = Boundary(progress)
        self._convener = Convener(node.background, settings.patience)
        self._roll = Roll(node, members, me)
        self._round, self._until = 0, 0.0  # the latter is monotonic: nobody is waited for any longer
        self._host: Host | None = None

    # -- from the main thread

    def start(self, round: int) -> None:
        """Attend and convene, for the boundary that ends ``round``."""
        self._round = round
        self._node.call(self._node.serve(PROTOCOL, self._answer), OPEN_TIMEOUT)
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
        self._until = time.monotonic() + self._patience + CATCH_UP
        with self._boundary.standing(self._boundary.number):
            for _ in range(TRIES):
                leader = self._roll.leader()
                found = await (self._lead() if leader is None else self._follow(leader))
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

    async def _follow(self, leader: Seat) -> Group | str:
        """The group that ``leader`` calls, or why there is none."""
        fresh = self._host is None or self._host.seat.peer_id != leader.peer_id
        if fresh and (reason := await self._attend(leader)):
            return reason
        host = self._host
        assert host is not None
        try:
            await host.stream.send(Ready(lineage=self._lineage()), TALK_TIMEOUT)
            return await self._heed(host)
        except (TimeoutError, StreamLost) as error:
            self._leave_host()
            if fresh:  # else it may only have given us up as too late: ask it once more
                self._roll.avoid(leader.peer_id)
            return f"{leader.name} is gone: {str(error) or 'no word from it'}"

    async def _heed(self, host: Host) -> Group | str:
        """What the convener decides. Raises :class:`StreamLost` or ``TimeoutError`` when it is gone."""
        while True:
            async with asyncio.timeout(min(SILENCE, self._until - time.monotonic())):
                word = await host.words.get()
            match word:
                case Wait():
                    log.debug("waiting: %s", fields(whom=word.whom, seconds=word.seconds))
                case Follow():
                    self._roll.learn(word.place.seat())
                    return f"{host.seat.name} does not lead any longer"
                case Behind():
                    return Group(self._round, behind=word.donor.seat())
                case Roster():
                    self._host = None
                    return self._group(word, host)
                case None:
                    raise StreamLost("its stream ended")

    def _group(self, roster: Roster, host: Host) -> Group | str:
        seats = tuple(place.seat() for place in roster.places)
        ids = [seat.peer_id for seat in seats]
        if ids.count(self._node.peer_id) != 1 or ids[0] != host.seat.peer_id:
            host.stream.close()
            return f"{host.seat.name} called a group without this peer or itself"
        me = ids.index(self._node.peer_id)
        links = tuple(Link(seat.peer_id, seat.name) for index, seat in enumerate(seats) if index != me)
        return Group(self._round, links, Assembly(roster.token, seats, me, 0, {0: host.stream}))

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
                await self._convener.dissolve(Place.of(leader))
            if self._host is None or self._host.seat.peer_id != leader.peer_id:
                await self._attend(leader)
        if not self._boundary.here:  # before the checkpoint is written: nobody shall wait for us
            self._leave_host()
            self._convener.close()

    async def _attend(self, leader: Seat) -> str:
        """Open a stream to ``leader`` and be admitted. Returns why not; empty when it worked."""
        self._leave_host()
        attend = Attend(
            run=self._me.run,
            config=self._me.config,
            place=Place.of(self._roll.own_seat()),
            round=self._round,
            eta=self._boundary.eta() or 0.0,
        )
        stream: Stream | None = None
        try:
            stream = await self._node.open(leader.peer_id, PROTOCOL, leader.addresses)
            await stream.send(attend, TALK_TIMEOUT)
            answer = await stream.receive(ANSWER, TALK_TIMEOUT)
        except (TimeoutError, StreamLost, BadMessage) as error:
            self._roll.avoid(leader.peer_id)
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
        if isinstance(answer, Decline) and answer.run is not None:
            self._me.warn_of_difference(leader.name, answer.run)
            self._roll.avoid(leader.peer_id)
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
            self._leave_host()

    def _leave_host(self) -> None:
        if self._host is not None:
            self._host.stream.close()
            self._host = None

    # -- on the network thread: answering

    async def _answer(self, stream: Stream) -> None:
        """A member attends, or a convener summons."""
        call = await stream.receive(CALL, TALK_TIMEOUT)
        if isinstance(call, Summon):
            if call.run == self._me.run and self._roll.welcome(stream.remote):
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
        if attend.run != self._me.run:
            return Decline(reason="another run")
        if attend.config != self._me.config:
            return Decline(reason="another configuration", run=self._me.canonical)
        if self._stop.requested:
            return Decline(reason="is leaving")
        if not self._roll.welcome(peer_id):
            return Decline(reason="a round has failed by you lately")
        leader = self._roll.leader()
        if leader is not None:
            return Follow(place=Place.of(leader))
        eta = self._boundary.eta()
        if eta is not None and attend.round < self._round and attend.eta < LATE * eta:
            return Decline(reason="came too late for this round")
        return Admit()
