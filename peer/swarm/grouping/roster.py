"""Who may be in a group of everyone, and who leads it: the directory, those that were named, without those that failed.

Previous station: the directory. Next stations: member.py, gathering.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from peer.logs import fields, get_logger
from peer.p2p.addresses import for_record
from peer.p2p.stream import StreamLost
from peer.rounds.types import Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import LIFETIME
from peer.swarm.grouping.messages import LeaderNotice

log = get_logger("gathering")

GATHER_PROTOCOL = "noloco/gather/3"
GATHER_TIMEOUT = 5.0  # seconds for one message
NOTICE_PERIOD = 2.0  # seconds between two notices to one member
MEMBER_BACKOFF = 30.0  # seconds for which a member that failed is left out
NAMED_MEMBERS = 1000  # that are kept


class KnownMembers:
    """Belongs to the network thread, but for :meth:`avoid`."""

    def __init__(self, context: SwarmContext) -> None:
        self._node, self._members, self._backoff = context.node, context.members, context.backoff
        self._named: dict[str, tuple[Seat, float]] = {}  # who was named or named itself, until when it counts
        self._notified: dict[str, float] = {}

    def leader(self) -> Seat | None:
        """The smallest id of all that may be there; ``None``: it is ours."""
        smaller = [seat for seat in self.others() if seat.peer_id < self._node.peer_id]
        return min(smaller, key=lambda seat: seat.peer_id, default=None)

    def others(self) -> list[Seat]:
        """Everybody that may be there, but this peer."""
        now = time.monotonic()
        seats = {key: seat for key, (seat, until) in self._named.items() if until > now}
        for record in self._members.live():
            if record.config == self._node.member.config:
                seats[record.peer_id] = Seat(record.peer_id, record.name, tuple(record.addresses))
        return [seat for key, seat in seats.items() if not self.avoided(key)]

    def missing(self, present: set[str]) -> list[Seat]:
        """Members that should have joined the group and have not."""
        return [seat for seat in self.others() if seat.peer_id not in present]

    def own_seat(self) -> Seat:
        return Seat(self._node.peer_id, self._node.member.name, for_record(self._node.addresses))

    def learn(self, seat: Seat, seconds: float = LIFETIME) -> None:
        """Somebody was named, named itself or was in a round with us, whatever the directory says at the moment."""
        now = time.monotonic()
        if len(self._named) >= NAMED_MEMBERS:
            self._named = {key: it for key, it in self._named.items() if it[1] > now}
        if seat.peer_id != self._node.peer_id and len(self._named) < NAMED_MEMBERS:
            self._named[seat.peer_id] = (seat, now + seconds)

    def avoid(self, peer_id: str, *, offence: bool = False) -> None:
        """Leave a member out for a while; one that only did not answer, until it shows itself again."""
        self._backoff.note(peer_id, MEMBER_BACKOFF, offence=offence)
        self._named.pop(peer_id, None)

    def avoided(self, peer_id: str) -> bool:
        """Is it left out now?"""
        return self._backoff.avoided(peer_id)

    def admits(self, peer_id: str) -> bool:
        """It has come by itself: is it to be let in?"""
        return self._backoff.welcome(peer_id)

    def notify(self, missing: Sequence[Seat]) -> None:
        """Tell members that have not joined who leads; one that cannot be told is left out for a while."""
        now = time.monotonic()
        for seat in missing:
            if now - self._notified.get(seat.peer_id, -NOTICE_PERIOD) >= NOTICE_PERIOD:
                self._notified[seat.peer_id] = now
                self._node.background(self._notify(seat))

    async def _notify(self, seat: Seat) -> None:
        try:
            stream = await self._node.open_to_member(seat.peer_id, GATHER_PROTOCOL, seat.addresses)
            await stream.send_last(LeaderNotice(seat=self.own_seat()), GATHER_TIMEOUT)
        except (TimeoutError, StreamLost) as error:
            log.debug("cannot be told who leads: %s", fields(peer=seat.name, reason=str(error)))
            self.avoid(seat.peer_id)
