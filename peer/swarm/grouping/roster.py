"""Who may be in a group of everyone, and who leads it: the directory, those that were named, without those that failed.

Previous station: members.py. Next stations: attending.py, gathering.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from peer.logs import fields, get_logger
from peer.p2p.addresses import for_record
from peer.p2p.stream import StreamLost
from peer.rounds.backoff import PeerBackoff
from peer.rounds.types import Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import LIFETIME
from peer.swarm.grouping.messages import MemberAddress, Summon

log = get_logger("gathering")

PROTOCOL = "noloco/gather/3"
TALK_TIMEOUT = 5.0  # seconds for one message
SUMMON_PERIOD = 2.0
AVOIDED = 30.0  # seconds for which a member that failed is left out
LEARNED = 1000  # names that are kept


class Roll:
    """Belongs to the network thread, but for :meth:`avoid`."""

    def __init__(self, footing: SwarmContext) -> None:
        self._node, self._members = footing.node, footing.members
        self._learned: dict[str, tuple[Seat, float]] = {}  # who summoned us or was named, until when it counts
        self._grudges = PeerBackoff()
        self._summoned: dict[str, float] = {}

    def leader(self) -> Seat | None:
        """The smallest id of all that may be there; ``None``: it is ours."""
        smaller = [seat for seat in self.others() if seat.peer_id < self._node.peer_id]
        return min(smaller, key=lambda seat: seat.peer_id, default=None)

    def others(self) -> list[Seat]:
        """Everybody that may be there, but this peer."""
        now = time.monotonic()
        seats = {key: seat for key, (seat, until) in self._learned.items() if until > now}
        for record in self._members.live():
            if record.config == self._node.member.config:
                seats[record.peer_id] = Seat(record.peer_id, record.name, tuple(record.addresses))
        return [seat for key, seat in seats.items() if not self.avoided(key)]

    def missing(self, present: set[str]) -> list[Seat]:
        """Members that should attend and do not."""
        return [seat for seat in self.others() if seat.peer_id not in present]

    def own_seat(self) -> Seat:
        return Seat(self._node.peer_id, self._node.member.name, for_record(self._node.addresses))

    def learn(self, seat: Seat, seconds: float = LIFETIME) -> None:
        """Somebody was named, named itself or was in a round with us, whatever the directory says at the moment."""
        now = time.monotonic()
        if len(self._learned) >= LEARNED:
            self._learned = {key: it for key, it in self._learned.items() if it[1] > now}
        if seat.peer_id != self._node.peer_id and len(self._learned) < LEARNED:
            self._learned[seat.peer_id] = (seat, now + seconds)

    def avoid(self, peer_id: str, *, offence: bool = False) -> None:
        """Leave a member out for a while; one that only did not answer, until it shows itself again."""
        self._grudges.note(peer_id, AVOIDED, offence=offence)
        self._learned.pop(peer_id, None)

    def avoided(self, peer_id: str) -> bool:
        """Is it left out now?"""
        return self._grudges.avoided(peer_id)

    def welcome(self, peer_id: str) -> bool:
        """It has come by itself: is it to be let in?"""
        return self._grudges.welcome(peer_id)

    def summon(self, missing: Sequence[Seat]) -> None:
        """Tell members that do not attend who leads; who cannot be told is left out for a while."""
        now = time.monotonic()
        for seat in missing:
            if now - self._summoned.get(seat.peer_id, -SUMMON_PERIOD) >= SUMMON_PERIOD:
                self._summoned[seat.peer_id] = now
                self._node.background(self._summon(seat))

    async def _summon(self, seat: Seat) -> None:
        try:
            stream = await self._node.open_to_member(seat.peer_id, PROTOCOL, seat.addresses)
            await stream.send(Summon(place=MemberAddress.of(self.own_seat())), TALK_TIMEOUT)
            await stream.until_closed(TALK_TIMEOUT)
            stream.close()
        except (TimeoutError, StreamLost) as error:
            log.debug("cannot be summoned: %s", fields(peer=seat.name, reason=str(error)))
            self.avoid(seat.peer_id)
