"""The convener's side of a group of everyone: who has come, whom to wait for and how long, who is in the roster.

Nobody is waited for longer than it announced (half as much again and some slack), and a member whose stream ends is
out at once. Previous station: convention.py. Next station: gathering.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from peer.logs import fields, get_logger
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.lineage import Lineage
from peer.rounds.types import Assembly, Group, Link, Seat
from peer.swarm.grouping.messages import MEMBER_WORD, Attend, Behind, Follow, MemberAddress, Ready, Roster, Wait

log = get_logger("gathering")

SLACK = 2.0  # seconds that a member may come late, on top of half the time it announced
SEND_TIMEOUT = 5.0
KEEP_ALIVE = 1.0  # seconds between two words to those who wait
CATCH_UP = 60.0  # seconds for a member to take the state of another


@dataclass(eq=False)
class Attendee:
    """A member's stream and what it has said. ``until`` is monotonic: when it is given up."""

    stream: Stream
    seat: Seat
    round: int
    until: float
    ready: Ready | None = None
    sent_off: bool = False  # for the group's weights, once
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        self.gone = True
        self.changed.set()
        self.stream.close()


class Convener:
    """Everything runs on the network thread."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], None], patience: float) -> None:
        self._spawn, self._patience = spawn, patience
        self._attendees: dict[str, Attendee] = {}
        self._news = asyncio.Event()
        self._gathering = False
        self._told = 0.0  # monotonic: when those who wait had a word last

    @property
    def present(self) -> set[str]:
        """Ids of the members that attend."""
        return set(self._attendees)

    def admit(self, stream: Stream, attend: Attend) -> None:
        """A member has come; one that comes again replaces its earlier stream."""
        earlier = self._attendees.pop(stream.remote, None)
        if earlier is not None:
            earlier.leave()
        place = attend.place.model_copy(update={"peer_id": stream.remote})  # what is authenticated counts
        wait = min(1.5 * attend.eta + SLACK, self._patience)
        attendee = Attendee(stream, place.seat(), attend.round, time.monotonic() + wait)
        self._attendees[stream.remote] = attendee
        self._spawn(self._listen(attendee))
        self._news.set()

    def close(self) -> None:
        """This peer leaves: those who attend find another convener."""
        for attendee in self._attendees.values():
            attendee.leave()

    async def dissolve(self, place: MemberAddress) -> None:
        """Somebody else leads: send everybody there."""
        attendees, self._attendees = self._attendees, {}
        for attendee in attendees.values():
            await _tell(attendee, Follow(place=place))
            attendee.leave()

    async def gather(self, me: Seat, own: Lineage, round: int, *, equal: bool, stopped: Callable[[], bool]) -> Group:
        """Wait for those who attend, then call the roster. ``equal``: all must have the same lineage."""
        self._gathering = True
        while True:
            self._news.clear()
            late = self._late(round)
            if not late or stopped():
                behind = self._behind(own) if equal else None
                if behind is None:
                    return await self._call(me, round)
                reference, strays = behind
                if own != reference:
                    self._gathering = False
                    self._spawn(self._keep_waiting(me))
                    return Group(round, behind=self._holder(reference))
                await self._send_off(me, strays)
                continue
            if self._time_for_a_word():
                seconds = max(attendee.until for attendee in late) - time.monotonic()
                await self._tell_to_wait(seconds, ", ".join(attendee.seat.name for attendee in late))
            soonest = min(attendee.until for attendee in late)
            await _within(self._news.wait(), min(KEEP_ALIVE, max(0.0, soonest - time.monotonic())))

    async def come_later(self, me: Seat, eta: float) -> None:
        """Others stand at the boundary and this peer, which convenes, still trains: they hear how long it will take.

        Not when it is overdue or too far off: then they go on without it.
        """
        if 0 < eta < self._patience and self._time_for_a_word():
            await self._tell_to_wait(eta, me.name)

    # -- who is here

    def _late(self, round: int) -> list[Attendee]:
        """Those to wait for. Who did not come in time is dropped; who attends for a later round is not waited for,
        unless all do: then it is our own count that is behind.
        """
        late = []
        due = max(round, min((attendee.round for attendee in self._attendees.values()), default=round))
        for peer_id, attendee in list(self._attendees.items()):
            if attendee.gone:
                self._attendees.pop(peer_id)
            elif attendee.ready is None and attendee.until < time.monotonic():
                log.info("not waited for any longer: %s", fields(peer=attendee.seat.name))
                self._attendees.pop(peer_id).leave()
            elif attendee.ready is None and attendee.round <= due:
                late.append(attendee)
        return late

    async def _listen(self, attendee: Attendee) -> None:
        """Note what a member says until its round begins or its stream ends."""
        try:
            while not attendee.gone:
                patience = max(attendee.until - time.monotonic(), 0.0) + SLACK
                attendee.ready = await attendee.stream.receive(MEMBER_WORD, patience)
                attendee.changed.clear()
                self._news.set()
                await attendee.changed.wait()  # told to catch up, or gone, or in the roster
                if attendee.ready is not None:
                    return
        except (TimeoutError, StreamLost, BadMessage) as error:
            log.debug("does not attend any longer: %s", fields(peer=attendee.seat.name, reason=str(error)))
            attendee.leave()
        finally:
            self._news.set()

    def _time_for_a_word(self) -> bool:
        due = time.monotonic() - self._told > KEEP_ALIVE
        self._told = time.monotonic() if due else self._told
        return due

    async def _tell_to_wait(self, seconds: float, whom: str) -> None:
        for attendee in list(self._attendees.values()):
            if attendee.ready is not None:
                await _tell(attendee, Wait(seconds=max(0.0, seconds), whom=whom[:128]))

    async def _keep_waiting(self, me: Seat) -> None:
        """While this peer takes the group's weights itself, the others hear that it lives."""
        until = time.monotonic() + CATCH_UP
        while not self._gathering and time.monotonic() < until:
            await self._tell_to_wait(until - time.monotonic(), me.name)
            await asyncio.sleep(KEEP_ALIVE)

    # -- whose slow weights count

    def _behind(self, own: Lineage) -> tuple[Lineage, list[Attendee]] | None:
        """The lineage with the most work in it (of equals, the one that most have) and who has another one.

        Most work and not most members: a swarm that comes back from checkpoints goes on from the newest one, and many
        who have begun anew on the other side of a split do not undo what few have trained.
        """
        held = Counter([own, *(it.ready.lineage for it in self._attendees.values() if it.ready is not None)])
        reference = max(held, key=lambda lineage: (lineage.contributions, held[lineage], lineage.digest))
        strays = [it for it in self._attendees.values() if it.ready and it.ready.lineage != reference]
        return (reference, strays) if strays or own != reference else None

    def _holder(self, lineage: Lineage) -> Seat:
        return next(it.seat for it in self._attendees.values() if it.ready and it.ready.lineage == lineage)

    async def _send_off(self, donor: Seat, strays: list[Attendee]) -> None:
        """Let them take the state of a member whose slow weights are right, and wait for them."""
        for attendee in strays:
            if attendee.sent_off:  # and has other weights all the same
                self._attendees.pop(attendee.seat.peer_id, None)
                attendee.leave()
                continue
            log.info("sent for the group's weights: %s", fields(peer=attendee.seat.name, donor=donor.name))
            attendee.ready, attendee.until, attendee.sent_off = None, time.monotonic() + CATCH_UP, True
            await _tell(attendee, Behind(donor=MemberAddress.of(donor)))
            attendee.changed.set()

    # -- the roster

    async def _call(self, me: Seat, round: int) -> Group:
        attendees = [it for it in self._attendees.values() if it.ready is not None and not it.gone]
        self._attendees = {key: it for key, it in self._attendees.items() if it.ready is None and not it.gone}
        attendees.sort(key=lambda attendee: attendee.seat.peer_id)
        seats = (me, *(attendee.seat for attendee in attendees))
        if not attendees:
            return Group(round)
        roster = Roster(token=secrets.token_hex(16), places=[MemberAddress.of(seat) for seat in seats])
        for attendee in attendees:
            attendee.changed.set()
            await _tell(attendee, roster)
        controls = {index: attendee.stream for index, attendee in enumerate(attendees, 1)}
        links = tuple(Link(seat.peer_id, seat.name) for seat in seats[1:])
        return Group(round, links, Assembly(roster.token, seats, 0, 0, controls))


async def _tell(attendee: Attendee, word: Wait | Follow | Behind | Roster) -> None:
    try:
        await attendee.stream.send(word, SEND_TIMEOUT)
    except (TimeoutError, StreamLost):
        attendee.leave()


async def _within(work: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
