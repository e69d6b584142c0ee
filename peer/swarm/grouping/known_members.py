"""The possible members of a group of everyone, from the directory and from messages of others: who is waited for, left
out, or asked to lead (leadership.py).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.addresses import for_record
from peer.p2p.stream import MESSAGE_TIMEOUT, StreamLost
from peer.rounds.backoff import BACKOFF_PHASES, MEMORY
from peer.rounds.transfer_rule import catch_up_limit
from peer.rounds.types import Newest, Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import LIFETIME
from peer.swarm.grouping.leadership import Leadership
from peer.swarm.grouping.messages import LeaderNotice

log = get_logger("grouping")

GATHER_PROTOCOL = "noloco/gather"
NOTICE_PERIOD = 2.0  # seconds between two notices to one member
MEMBER_BACKOFF = 30.0  # seconds for which a member that failed is left out at least: until all have noticed it
UNREACHED_PHASES = 2.0  # inner phases until one that could not be reached is asked again
COST_FACTOR = 4.0  # times as long as it made others wait for no group, a leader is left out at least
NEW_PHASES = 6.0  # inner phases for which a member that has taken part in no round is waited for
NEW_SLACK = 10.0  # seconds on top of them
NAMED_MEMBERS = 1000  # members from messages that are kept


class KnownMembers:
    """Belongs to the network thread. The training thread, too, calls :meth:`leader`, :meth:`longest`, :meth:`missed`,
    :meth:`made_fail` and :meth:`suspected`, so what they change is never iterated over without a copy.
    """

    def __init__(self, context: SwarmContext, patience: float) -> None:
        self._patience, self._boundary, self._progress = patience, context.boundary, context.boundary.progress
        self._node, self._members, self._backoff = context.node, context.members, context.backoff
        self._named: dict[str, tuple[Seat, float]] = {}  # from messages, with the time until which it counts
        self._notice_due: dict[str, float] = {}  # from when on a member may get the next notice
        self.leadership = Leadership(self._node, lambda: self._backoff_seconds)
        self._suspected, self._left_out = Counter[str](), Counter[str]()  # how often, by id; how often for that
        self._unreached = False  # a member lives, and this peer has failed to call it twice
        self._absent: set[str] = set()  # ids of members that were told to join, and have not
        self._missed = Newest[float](NAMED_MEMBERS)  # the time until which it is known that one did not come, by id

    # -- who leads

    def leader(self) -> Seat | None:
        """The member that leads; ``None`` when that is this peer."""
        present = self._present()
        return present.get(self.leadership.among(present))

    def elected(self, seat: Seat) -> None:
        """The member that was asked to lead names another one."""
        self.learn(seat)
        self.leadership.named(seat.peer_id)

    def claimed(self, seat: Seat, *, established: bool) -> None:
        """A member says that it leads: see :meth:`Leadership.claimed`."""
        self.learn(seat)
        if self.leader() is None:
            self.leadership.claimed(seat.peer_id, established=established)

    def successor(self, present: Sequence[Seat]) -> Seat | None:
        """Who shall lead instead of this peer, as it does not reach a member that lives: others may reach it."""
        if not self._unreached or not present:
            return None
        self._unreached = False
        return random.choice(present)

    # -- who is there

    def _present(self) -> dict[str, Seat]:
        """All possible members other than this peer, by id. A record counts before a message."""
        now = clock.monotonic()
        found = {peer_id: seat for peer_id, (seat, until) in list(self._named.items()) if until > now}
        for record in self._members.live():
            if record.state == "paused":
                found.pop(record.peer_id, None)
            elif record.config == self._node.member.config:
                found[record.peer_id] = Seat(record.peer_id, record.name, tuple(record.addresses))
        return {peer_id: it for peer_id, it in found.items() if not self._backoff.avoided(peer_id)}

    def missing(self, present: set[str]) -> list[Seat]:
        """Possible members that are not ``present`` in the group."""
        return [seat for peer_id, seat in self._present().items() if peer_id not in present]

    def expected(self, present: set[str]) -> list[Seat]:
        """As :meth:`missing`, without those that have not joined last time either: a round does not wait for them."""
        self._absent -= present
        return [seat for seat in self.missing(present) if seat.peer_id not in self._absent]

    def stayed_away(self, seats: Sequence[Seat]) -> None:
        """They have been told to join, and a round begins without them."""
        self._absent = self._present().keys() & (self._absent | {seat.peer_id for seat in seats})

    def own_seat(self) -> Seat:
        return Seat(self._node.peer_id, self._node.member.name, for_record(self._node.addresses))

    def learn(self, seat: Seat, seconds: float = LIFETIME) -> None:
        """A message named this member, or a round had it: it counts for ``seconds`` without a record."""
        now = clock.monotonic()
        if len(self._named) >= NAMED_MEMBERS:
            self._named = {key: it for key, it in list(self._named.items()) if it[1] > now}
        if seat.peer_id != self._node.peer_id and len(self._named) < NAMED_MEMBERS:
            self._named[seat.peer_id] = (seat, now + seconds)

    def avoid(self, peer_id: str) -> None:
        """Leave a member out for a while, or until it calls."""
        seconds = max(MEMBER_BACKOFF, UNREACHED_PHASES * self._progress.phase_seconds)
        self._leave_out(peer_id, seconds, offence=False, refused=False)

    @property
    def _backoff_seconds(self) -> float:
        return max(MEMBER_BACKOFF, BACKOFF_PHASES * self._progress.phase_seconds)

    def _leave_out(self, peer_id: str, seconds: float, *, offence: bool, refused: bool) -> None:
        self._backoff.note(peer_id, seconds, offence=offence, refused=refused)
        self._named.pop(peer_id, None)
        self.leadership.followed_in_vain(peer_id)

    def patience(self, peer_id: str) -> float:
        """Seconds of the longest wait for a member. Who has not taken part in a round delays the others by few phases:
        an id costs nothing. So does who did not come of late, as the next round costs it nothing either. So does this
        peer, if it leads: the others give up a new leader that waits longer.
        """
        phase_seconds, own = self._progress.phase_seconds, peer_id == self._node.peer_id
        if not phase_seconds or (self.leadership.established if own else self._reliable(peer_id)):
            return self._patience
        return min(self._patience, NEW_PHASES * phase_seconds + NEW_SLACK)

    def _reliable(self, peer_id: str) -> bool:
        """Has it taken part in the last round, and missed none of late? One that could not be reached has missed none:
        it may be many times as slow as this peer.
        """
        return peer_id in self._node.proven and self._missed.get(peer_id, 0.0) <= clock.monotonic()

    def longest(self, peer_id: str) -> float:
        """Seconds that a round of this member may make others wait: for members, and once until all caught up.

        Who is new to a group that averages already takes its weights before it leads.
        """
        known = peer_id in self._node.proven or peer_id == self._node.peer_id or not self.leadership.established
        return self.patience(peer_id) + (catch_up_limit(self._boundary.longest_phase_seconds) if known else 0.0)

    def missed(self, peer_id: str, waited: float = 0.0) -> None:
        """A member has not come in the time that it announced, or a leader has formed no group for ``waited`` seconds.

        All wait for a leader: what it costs must not be worth it. A member may have had a bad line twice. It is known
        for many times as long as others waited: who merged a round after each miss cost all ``patience`` every time.
        """
        forgotten = clock.monotonic() + MEMORY * max(self._backoff_seconds, self.patience(peer_id))
        self.made_fail(peer_id, offence=not self._reliable(peer_id), cost=waited)
        self._missed[peer_id] = max(forgotten, self._missed.get(peer_id, 0.0))  # a cheap miss hides no dear one
        self._node.proven.discard(peer_id)

    def made_fail(self, peer_id: str, *, offence: bool, cost: float = 0.0) -> None:
        """A round failed because of this member, after so many seconds. Once, it may have been its line or another
        member: it comes back by a call. The second time within a while it stays out, as each time costs all members a
        deadline.
        """
        seconds = max(self._backoff_seconds, COST_FACTOR * cost)
        self._leave_out(peer_id, seconds, offence=offence, refused=self._backoff.remembers(peer_id))

    def suspected(self, pair: Sequence[str]) -> None:
        """These members contradict each other, or one accuses another: one of them lies, or a line is cut. One is left
        out: who was a suspect more often, as a liar that accuses several, else they take turns.
        """
        if len(self._suspected) > NAMED_MEMBERS:
            self._suspected.clear()
            self._left_out.clear()
        self._suspected.update(pair)
        out = max(pair, key=lambda peer_id: (self._suspected[peer_id], -self._left_out[peer_id], peer_id))
        self._left_out[out] += 1
        for peer_id in pair:
            if peer_id == out != self._node.peer_id:
                self._leave_out(peer_id, self._backoff_seconds, offence=False, refused=True)
            elif peer_id != out:
                self._backoff.forgive(peer_id)

    def notify(self, missing: Sequence[Seat]) -> None:
        """Tell members that have not joined that this peer leads; leave out those that cannot be reached."""
        now = clock.monotonic()
        self._notice_due = {peer_id: due for peer_id, due in self._notice_due.items() if due > now}
        for seat in missing:
            if seat.peer_id not in self._notice_due:
                self._notice_due[seat.peer_id] = math.inf  # on a slow line several at a time would slow each other
                self._node.background(self._notify(seat))

    async def _notify(self, seat: Seat) -> None:
        due = clock.monotonic() + NOTICE_PERIOD
        try:
            stream = await self._node.open_to_member(seat.peer_id, GATHER_PROTOCOL, seat.addresses)
            notice = LeaderNotice(seat=self.own_seat(), established=self.leadership.grouped)
            await stream.send_last(notice, MESSAGE_TIMEOUT)
        except (TimeoutError, StreamLost) as error:
            log.debug("cannot be told of its leader: %s", fields(peer=seat.name, reason=str(error)))
            self._unreached = self._backoff.remembers(seat.peer_id)  # a dead one has no record any more
            self.avoid(seat.peer_id)
        finally:
            self._notice_due[seat.peer_id] = due
