"""The history of each peer since this node has started. Pure: it gets records and the time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dht_bootstrap.refusals import Refusals, ToldRefusals
from peer.swarm.directory.ended import ENDED_PEERS, EndedRun, last_peer
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, MemberRecord

IDLE_SECONDS = 300.0  # seconds over which an idle share is taken
CLOCK = 60.0  # seconds over which a clock is judged
KEPT_WHOLE = 300.0  # seconds after a run's end: what looked like its end may have been an outage of this node
FORGET = 600.0  # seconds for which a meeting, and a peer that is gone, are shown
POINTS = 240  # of a curve
NAMED = 512  # peers of all runs that are followed and named; the others are counted
KEPT_EVENTS = 50
PARTNERS = 6  # kept of each peer
KEPT_ROUNDS = 100  # of each peer: their mean length is taken


class Point(NamedTuple):
    """One point of a peer's curves; ``at`` in unix seconds."""

    at: float
    step: int
    train_loss: float | None
    idle_share: float | None


class Event(NamedTuple):
    at: float
    event: str
    name: str
    peer_id: str


@dataclass
class Curve:
    """At most ``POINTS`` points over the whole time: when they are too many, every other one is deleted."""

    points: list[Point] = field(default_factory=list)
    interval: float = 2.0  # seconds between two, at least; only the newest one may come earlier

    def add(self, point: Point) -> None:
        if len(self.points) > 1 and self.points[-1].at - self.points[-2].at < self.interval:
            self.points.pop()  # it is the newest no more
        self.points.append(point)
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self.interval *= 2


class PeerHistory:
    """One peer of one run."""

    def __init__(self, record: MemberRecord) -> None:
        self.record = record
        self.gone_at, self.gone_as = 0.0, ""  # when, and the event; no event while it is live
        self.curve = Curve()
        self.partners: deque[str] = deque(maxlen=PARTNERS)  # ids
        self._times: deque[tuple[float, float, float]] = deque()  # when, seconds and idle seconds of the process
        self._ages: deque[tuple[float, float]] = deque()  # when, age of the record by this node's clock
        self._rounds: deque[float] = deque(maxlen=KEPT_ROUNDS)  # seconds of its process when each began
        self.written = 0.0  # unix seconds, by the peer's clock
        self.told = ToldRefusals(record.report)

    @property
    def live(self) -> bool:
        return not self.gone_as

    @property
    def state(self) -> str:
        """What its record says; ``left`` or ``lost`` when it is gone."""
        return self.gone_as or self.record.state

    def see(self, entry: Entry, now: float) -> int:
        """A record was read; returns the number of merges since the one before."""
        before, self.record = self.record, entry.record
        self.written = entry.expires - LIFETIME
        report = entry.record.report
        self._ages.append((now, now - self.written))
        while self._ages[0][0] < now - CLOCK:
            self._ages.popleft()
        if self._times and report.seconds < self._times[-1][1]:
            self._times.clear()  # its process is a new one
            self._rounds.clear()
        if entry.record.round != before.round:
            self._rounds.append(report.seconds)
        if not self._times or report.seconds > self._times[-1][1]:
            self._times.append((now, report.seconds, report.idle_seconds))
        while len(self._times) > 2 and self._times[0][0] < now - IDLE_SECONDS:
            self._times.popleft()
        self.curve.add(Point(now, entry.record.step, report.train_loss, self.idle_share()))
        fresh = report.merges - before.report.merges
        return fresh if fresh >= 0 else report.merges

    def idle_share(self) -> float | None:
        """Share of the last minutes in which the peer was idle; ``None`` without a record."""
        if not self._times:
            return None
        first = self._times[0] if len(self._times) > 1 else (0.0, 0.0, 0.0)
        seconds, idle = (self._times[-1][1] - first[1], self._times[-1][2] - first[2])
        return min(1.0, max(0.0, idle / seconds)) if seconds > 0 else None

    def round_seconds(self) -> float | None:
        """Mean length of its last rounds, without the present one, which may never end. Until this node has seen two
        rounds begin it is the mean time between merges, or ``None`` if the peer has merged fewer than two times, or if
        it has taken a member's state since, for longer than it had trained.
        """
        if len(self._rounds) > 1:
            return (self._rounds[-1] - self._rounds[0]) / (len(self._rounds) - 1)
        report = self.record.report
        if report.merged_ago is None or report.merges < 2 or report.merged_ago > report.seconds:
            return None
        return (report.seconds - report.merged_ago) / report.merges

    def unmerged_seconds(self, now: float) -> float:
        """Since its last merge; before the first, since its process has joined. Without pauses."""
        ago = self.record.report.merged_ago
        return self.record.report.seconds if ago is None else ago + now - self.written

    def clock_ahead(self) -> float | None:
        """Seconds by which its clock seems to be ahead of this node's; ``None`` with fewer than five records.

        A record is some seconds old when it is read, so the youngest of a minute counts.
        """
        return -min(age for _, age in self._ages) if len(self._ages) >= 5 else None


class RunHistory:
    """One run. After its end it stays as it was: ``peers`` are those of its last minutes."""

    def __init__(self, began: float = 0.0) -> None:
        self.began, self.ended_at = began, 0.0  # unix seconds; 0 while it has live members
        # unix seconds at which the directory was read: last, and last with fewer than two members that are not paused
        self.looked = self.few_at = -math.inf
        self.peers: dict[str, PeerHistory] = {}
        self.unnamed: list[MemberRecord] = []  # live members beyond those in ``peers``
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.event_counts: Counter[str] = Counter()
        self.meetings: deque[tuple[float, str, str]] = deque(maxlen=10_000)  # when, the reporting peer, its partner
        self.refusals = Refusals()

    def live(self) -> dict[str, PeerHistory]:
        return {peer_id: peer for peer_id, peer in self.peers.items() if peer.live}

    def see(self, entries: Mapping[str, Entry], now: float, room: int = NAMED) -> None:
        """The directory was read. At most ``room`` peers are followed: those known first, and the live ones."""
        self.unnamed = []
        telling = [(peer_id, entry) for peer_id, entry in entries.items() if self._follow(peer_id, entry, now, room)]
        ids = self._ids()
        for peer_id, entry in telling:
            self._told_by(peer_id, entry, ids, now)
            if entry.record.state == "left":
                self._gone(peer_id, "left", now)
        for peer_id in self.live().keys() - entries.keys():
            self._gone(peer_id, "lost", now)
        self.refusals.count(len(self.live()))
        if self.live() or self.unnamed:
            self.ended_at = 0.0
            self._forget(now)
        elif not self.ended_at:
            self.ended_at = now
        elif now - self.ended_at > KEPT_WHOLE:
            self.peers = self._most()
        self.looked = now
        if sum(record.state != "paused" for record in self.members()) < 2:
            self.few_at = now

    def members(self) -> list[MemberRecord]:
        """Of the live members."""
        return [*(peer.record for peer in self.live().values()), *self.unnamed]

    def present(self) -> dict[str, PeerHistory]:
        """The live peers by id; after the end those of its last minutes."""
        return self.peers if self.ended_at else self.live()

    def last(self, name: str, now: float) -> EndedRun:
        """What is left of it after its end."""
        peers = [  # its clock may be ahead
            last_peer(it.record, left=it.gone_as == "left", age=max(0.0, now - it.written))
            for it in self._most().values()
        ]
        return EndedRun(run=name, age=now - self.ended_at, peers=peers)

    def _most(self) -> dict[str, PeerHistory]:
        """The peers that gave most, by id: as many as are kept after the end."""
        most = sorted(self.peers.items(), key=lambda item: item[1].record.report.tokens, reverse=True)
        return dict(most[:ENDED_PEERS])

    def _forget(self, now: float) -> None:
        forget = 0.0 if self.unnamed else FORGET
        self.peers = {key: it for key, it in self.peers.items() if it.live or now - it.gone_at < forget}
        self.refusals.forget(now, self.peers)
        while self.meetings and self.meetings[0][0] < now - FORGET:
            self.meetings.popleft()

    def _follow(self, peer_id: str, entry: Entry, now: float, room: int) -> bool:
        """Is it a record of a live peer that is followed, perhaps from now on? One that has left tells its last
        figures.
        """
        peer = self.peers.get(peer_id)
        if entry.record.state == "left":
            return peer is not None and peer.live
        if entry.expires <= now:
            return False
        if peer is None and len(self.peers) >= room:
            self.unnamed.append(entry.record)
            return False
        if peer is not None and not peer.live and entry.expires - LIFETIME <= peer.written:
            return False  # a record from before it left
        if peer is None or not peer.live:
            self.peers.setdefault(peer_id, PeerHistory(entry.record)).gone_as = ""
            self._say("joined", entry.record, peer_id, now)
        return True

    def _told_by(self, peer_id: str, entry: Entry, ids: Mapping[str, str], now: float) -> None:
        """A record of a live peer was read; ``ids``: of all live peers, by name."""
        peer = self.peers[peer_id]
        refused = [ids[name] for name in peer.told.fresh(entry.record.report) if name in ids]
        self.refusals.tell(entry.record.peer_id, refused, now)
        partners = [ids[name] for name in entry.record.report.partners if name in ids]
        if peer.see(entry, now) and partners:
            peer.partners.extend(partners)
            self.meetings.extend((now, peer_id, partner) for partner in partners)

    def _gone(self, peer_id: str, how: str, now: float) -> None:
        peer = self.peers[peer_id]
        peer.gone_at, peer.gone_as = now, how
        self._say(how, peer.record, peer_id, now)

    def _say(self, event: str, record: MemberRecord, peer_id: str, now: float) -> None:
        self.events.append(Event(now, event, record.name, peer_id))
        self.event_counts[event] += 1

    def _ids(self) -> dict[str, str]:
        """Of live peers by name, without names that two of them have."""
        live = self.live()
        names = Counter(peer.record.name for peer in live.values())
        return {peer.record.name: peer_id for peer_id, peer in live.items() if names[peer.record.name] == 1}
