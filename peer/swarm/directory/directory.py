"""Writes this peer's record to the DHT and reads those of the others: a bounded number of buckets a period."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from peer import clock
from peer.errors import one_line
from peer.logs import get_logger
from peer.p2p.addresses import is_circuit, most_public
from peer.p2p.dht import search
from peer.p2p.dht.join import CLOCK_TOLERANCE, get_in_touch, neighbours
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.rounds.types import Newest
from peer.swarm.directory import buckets as directory
from peer.swarm.directory import records
from peer.swarm.directory.buckets import Bucket
from peer.swarm.directory.reader import Reader
from peer.swarm.directory.records import NO_REPORT, MemberRecord

log = get_logger("members")

WAITING_SECONDS = 1.0  # the period while others are awaited; a newcomer's first one, then twice as long each time
LEAST_PAUSE = 0.5  # seconds between two looks: one that took longer than the period is not followed at once
EXPIRY_STEP = 0.01  # seconds: the DHT keeps a record only if it expires later than the one that it replaces
REWRITE_ROUNDS = 4  # rounds after which a record is written again: others compare their own with it (healing.py)
SUSPENDED_SECONDS = 60.0  # in which this process did nothing; more than a look takes, which counts too
MET_LIFETIME = 2 * records.LIFETIME  # seconds, at least, for which a partner stays a candidate without a record
KEPT_NAMES = 1000  # of partners, for reports


class Members(Reader):
    """The directory as a member has it: it also announces this peer. ``describe`` makes this peer's current record.

    ``woke`` is called on the network thread when this process has stood still (a machine that slept, a container that
    was paused), before the records of others are read again, with the seconds that the monotonic clock did not count.
    """

    def __init__(
        self, node: Node, run: str, describe: Callable[[], MemberRecord], woke: Callable[[float], None] = lambda _: None
    ) -> None:
        super().__init__(node, run)
        self._describe, self._woke = describe, woke
        self._names = Newest[str](KEPT_NAMES)  # by id, for reports: a record may come after a meeting
        self._last_record: MemberRecord | None = None  # as it was written last, without its counters
        self._written = search.Held("", 0.0)
        self._copies: dict[Bucket, set[Any]] = {}  # ids of the nodes that have it

    # -- from the training thread

    def start(self) -> None:
        """Announce from now on, until :meth:`leave`."""
        self._node.own.members = self._relays
        self._node.keep(self._keep_announcing)

    def announce(self) -> None:
        """Write this peer's record now, if others would learn something from it."""
        self._node.call(self._store(self._describe()), 2 * RPC_TIMEOUT)

    def leave(self) -> None:
        """Withdraw this peer's record, so that no member looks for it."""
        gone = self._describe().model_copy(update={"state": "left"})
        self._node.call(self._store(gone), 2 * RPC_TIMEOUT)

    # -- from any thread

    def candidates(self) -> list[MemberRecord]:
        """The live members that are not paused, and those met lately: others may fill the directory."""
        now, kept = clock.unix(), self.kept
        return [
            entry.record
            for peer_id, entry in list(self.known.items())
            if entry.record.state not in ("left", "paused") and max(entry.expires, kept.get(peer_id, 0.0)) > now
        ]

    def keep(self, peer_id: str, seconds: float) -> None:
        """A swap with this member has succeeded: it stays a candidate, until it fails to answer."""
        self.kept[peer_id] = clock.unix() + max(seconds, MET_LIFETIME)

    def name_of(self, peer_id: str, said: str = "") -> str:
        """The name in its record, or in the last one that was asked for here; else the name that it has ``said``, as a
        newcomer comes before its record, if no other member has it; else the end of its id.
        """
        known = self.known.get(peer_id)  # one look-up: the network thread may drop it meanwhile
        if known is not None:
            self._names[peer_id] = known.record.name
        elif said and peer_id not in self._names and said not in self._all_names():
            return said
        return self._names.get(peer_id, peer_id[-6:])

    def _all_names(self) -> set[str]:
        known = list(self.known.values())  # other threads may change both
        return {entry.record.name for entry in known}.union(list(self._names.values()))

    def taken_by(self, peer_id: str) -> int:
        """How often it has taken the weights of others, by its record."""
        known = self.known.get(peer_id)
        return known.record.taken if known is not None else 0

    def forget(self, peer_id: str) -> None:
        """Drop a member that does not answer until its next record is read."""
        self.kept.pop(peer_id, None)
        self.known.pop(peer_id, None)

    def _dialled(self) -> list[MemberRecord]:
        """The members that others can dial: a relay is not their first address."""
        return [it for it in self.live() if it.addresses and not is_circuit(it.addresses[0])]

    def _relays(self) -> list[str]:
        """An address of each of them, with its id: they relay to those that cannot be dialled."""
        return [f"{most_public(it.addresses)}/p2p/{it.peer_id}" for it in self._dialled()]

    # -- on the network thread

    async def _keep_announcing(self) -> None:
        period = WAITING_SECONDS  # others may have come at the same moment
        while True:
            slept = clock.unix()  # the other clock does not count a machine's sleep, which may begin within a look
            began = clock.monotonic()
            for work in (partial(self.look, directory.READS), self._tell, self._get_to_know):
                try:
                    await work()
                except Exception as error:  # noqa: BLE001 - hivemind raises many types; the next period may succeed
                    log.warning("the directory does not answer, trying again: %s", one_line(error))
            waits = self._last_record is not None and self._last_record.state == "waiting"
            pause = max(LEAST_PAUSE, period * random.uniform(0.8, 1.2) - (clock.monotonic() - began))
            await asyncio.sleep(pause)
            stood = clock.unix() - slept
            if stood > pause + SUSPENDED_SECONDS:
                self._woke(max(0.0, stood - (clock.monotonic() - began)))
            period = WAITING_SECONDS if waits else min(2 * period, records.ANNOUNCE_SECONDS)

    async def _tell(self) -> None:
        if self._last_record is None or self._last_record.state != "left":
            await self._store(self._describe())

    async def _get_to_know(self) -> None:
        """One member that our DHT does not know, as long as it knows few: who told us of both may be gone."""
        known = neighbours(self._node.dht)
        dialled = [it for it in self._dialled() if it.peer_id not in known]
        if dialled and len(known) < search.NEIGHBOURS:
            member = self.chance.choice(dialled)
            ways = self._node.ways(member.addresses)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RPC_TIMEOUT):
                    await get_in_touch(self._node.p2p, self._node.dht, member.peer_id, ways)

    async def _store(self, record: MemberRecord) -> None:
        """Write the record when it has changed or is old; otherwise to nodes that lack it."""
        coarse = {"round": record.round // REWRITE_ROUNDS, "step": 0, "tokens_per_second": 0.0, "report": NO_REPORT}
        said = record.model_copy(update=coarse)
        now, left, works = clock.unix(), record.state == "left", []
        if self._written.expires > now + records.LIFETIME + CLOCK_TOLERANCE:  # the clock was ahead, and has been set
            self._last_record, self._written, self._copies = None, search.Held("", 0.0), {}
        buckets = [*directory.writes(self._node.peer_id, self.size.members), *(self._copies if left else ())]
        old = self._written.expires < now + records.LIFETIME - records.WRITTEN_FOR
        if said != self._last_record or old:
            expires = max(now + records.LIFETIME, self._written.expires + EXPIRY_STEP)
            self._last_record, self._written, self._copies = said, search.Held(records.encode(record), expires), {}
            if self.chance.random() * self.size.members < records.RUNS_WRITERS and not left:
                works.append(self._name_run(expires - records.LIFETIME + records.RUNS_LIFETIME))
        works += [self._copy(bucket) for bucket in dict.fromkeys(buckets)]
        async with asyncio.timeout(2 * RPC_TIMEOUT):
            await asyncio.gather(*works)

    async def _copy(self, bucket: Bucket) -> None:
        """Write this peer's record to the nodes that keep ``bucket`` and lack it."""
        key, record = records.members_key(self._run, bucket), self._written
        copies = self._copies.setdefault(bucket, set())
        nodes = self.keepers.get(bucket, [])
        if not nodes and not copies:
            nodes = await search.keepers(self._node.dht, key, self.anchors(bucket))
        missing = [node for node in nodes if node not in copies]
        if missing:
            copies |= await search.write(self._node.dht, key, self._node.subkey, record, missing)

    async def _name_run(self, expires: float) -> None:
        nodes = await search.keepers(self._node.dht, records.RUNS, self._node.anchors())
        await search.write(self._node.dht, records.RUNS, self._node.subkey, search.Held(self._run, expires), nodes)
