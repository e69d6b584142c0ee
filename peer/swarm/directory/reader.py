"""Reads the directory as checked records, for members (directory.py) and for onlookers, which are no members."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from peer import __version__, clock
from peer.errors import RunError
from peer.logs import get_logger
from peer.p2p.deadline import together
from peer.p2p.dht import search
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.rounds.types import NAME
from peer.swarm.directory import buckets as directory
from peer.swarm.directory import records
from peer.swarm.directory.buckets import ANCHORED, Bucket, bucket_of
from peer.swarm.directory.likely_runs import likeliest, networks_of
from peer.swarm.directory.records import MemberRecord

log = get_logger("members")

LOOK_TIMEOUT = 20.0  # seconds for one look at all runs
RUN_TIMEOUT = 8.0  # seconds for one run: its nodes may be slow on purpose
LOOKS = 3  # attempts to read a directory that seems empty while a node has not answered
FOREIGN_PEERS = 1000  # peers of other versions that the log names
ONLOOKER_READS = 64  # buckets an onlooker reads at once: all of a swarm of about 1,500, a part of a larger one
WATCHED_RUNS = 16
TRIED_RUNS = 2  # in each look but the first: so many new names are looked at, in their turn


class Entry(NamedTuple):
    """A member's record; ``expires`` in unix seconds of its clock."""

    record: MemberRecord
    expires: float

    def is_live(self, now: float) -> bool:
        """It has neither expired nor been withdrawn."""
        return self.expires > now and self.record.state != "left"


class Reader:
    """The newest record of each peer of one run, until it expires, and an estimate of the run's size.

    Belongs to the network thread; any thread may read ``known`` and call :meth:`live`.
    """

    def __init__(self, node: Node, run: str, foreign: set[str] | None = None) -> None:
        """``foreign``: the ids of whom it was logged that they run another version."""
        self._node, self._run = node, run
        self.known: dict[str, Entry] = {}  # by peer id
        self.kept: dict[str, float] = {}  # unix seconds until which an entry of a peer is not dropped, by its id
        self._held: dict[Bucket, dict[str, search.Held]] = {}  # what was read, by subkey, until it expires
        self.keepers: dict[Bucket, list[Any]] = {}  # ids of the nodes that keep the buckets of the last look
        self.size = directory.SwarmSize()
        self.chance = random.Random(random.getrandbits(64))
        self._foreign = set() if foreign is None else foreign

    def refresh_all(self) -> list[MemberRecord]:
        """Read many buckets now, all of a small swarm; returns the live members without this peer.

        From the main thread. Raises :class:`RunError` when too few nodes answer.
        """
        try:
            self._node.call(self._look_around(), LOOKS * 8 * RPC_TIMEOUT)
        except TimeoutError:
            raise RunError("the swarm's directory does not answer") from None
        return self.live()

    def live(self, *, since: float = 0.0) -> list[MemberRecord]:
        """Members other than this peer with a valid record that was written after ``since`` (unix seconds).

        The record of a killed peer stays valid for ``records.LIFETIME``.
        """
        after = max(clock.unix(), since + records.LIFETIME)
        return [entry.record for entry in list(self.known.values()) if entry.is_live(after)]

    async def look(self, count: int) -> None:
        """Read ``count`` buckets, and sometimes one of each level that others may use."""
        self.size.learn(await self._take_in(self.size.look(count, self.chance), search.ASKED_NODES))

    async def _look_around(self) -> None:
        """As a newcomer: estimate the number of members, then read many buckets."""
        for _ in range(LOOKS):
            found = await self._take_in(directory.probes(self.chance), search.ASKED_NODES)
            self.size = directory.SwarmSize(directory.estimate(found))
            first = self.chance.randrange(2**directory.LAST_LEVEL)
            buckets = directory.reads(self.size.members, directory.NEWCOMER_READS, first)
            await self._take_in(buckets, search.COPIES)
            if self.known or not await self._node.asked_in_vain():
                return

    async def _take_in(self, buckets: Sequence[Bucket], asked: int) -> dict[Bucket, int]:
        """Read these buckets at ``asked`` nodes each; returns how many live records of others each has."""
        try:
            async with asyncio.timeout(2 * RPC_TIMEOUT):
                keepers = await asyncio.gather(*(self._read(bucket, asked) for bucket in buckets))
            self.keepers = dict(zip(buckets, keepers, strict=True))
        finally:
            now = clock.unix()
            for bucket, held in list(self._held.items()):
                self._held[bucket] = {subkey: it for subkey, it in held.items() if it.expires > now}
            found = {bucket: list(self._entries(bucket)) for bucket in buckets}
            self._held = {bucket: held for bucket, held in self._held.items() if held}
            for entry in itertools.chain.from_iterable(found.values()):
                known = self.known.get(entry.record.peer_id)
                if known is None or known.expires < entry.expires:
                    self.known[entry.record.peer_id] = entry
            self.kept = {key: until for key, until in list(self.kept.items()) if until > now}
            entries = list(self.known.items())  # the training thread may forget one meanwhile
            self.known = {key: entry for key, entry in entries if entry.expires > now or key in self.kept}
        return {bucket: sum(entry.is_live(now) for entry in entries) for bucket, entries in found.items()}

    async def _read(self, bucket: Bucket, asked: int) -> list[Any]:
        """Ask for what is new in a bucket; returns the nodes that keep it. Raises what hivemind raises."""
        held = dict(self._held.get(bucket, {}))
        try:
            key, anchors = records.members_key(self._run, bucket), self.anchors(bucket)
            return await search.read(self._node.dht, key, held, asked, anchors)
        finally:
            self._held[bucket] = held

    def anchors(self, bucket: Bucket) -> list[Any]:
        """Ids of the nodes that keep a bucket of a small swarm besides the nearest."""
        return self._node.anchors() if bucket.level <= ANCHORED else []

    def _entries(self, bucket: Bucket) -> Iterator[Entry]:
        """The records of a bucket without this node's own. In a bucket of others a record would count again."""
        for subkey, held in self._held.get(bucket, {}).items():
            record = records.decode(subkey, held.text)
            if record is None:
                self._warn_of_version(subkey, held.text)
            elif record.peer_id != self._node.peer_id and bucket_of(record.peer_id, bucket.level) == bucket:
                yield Entry(record, held.expires)

    def _warn_of_version(self, subkey: object, value: object) -> None:
        """Log once for each peer that it runs another version; nothing else in its record is believed."""
        foreign = records.program_of(subkey, value)
        if foreign is None or foreign.peer_id == self._node.peer_id:
            return
        if foreign.peer_id not in self._foreign and len(self._foreign) < FOREIGN_PEERS:
            self._foreign.add(foreign.peer_id)
            said = f"version {foreign.version}, this is {__version__}, and they do not understand each other"
            log.warning("peer %s runs %s: update the older one", foreign.name, said)


class Onlooker:
    """Finds the runs of a DHT and reads the directory of each."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._readers: dict[str, Reader] = {}
        self._foreign: set[str] = set()  # of all runs: a reader without members is forgotten
        self._named: dict[str, search.Held] = {}  # records with the name of a run, by subkey, until they expire
        self._began = False  # a name was found
        self.alone = True  # no other node has answered the last look

    def read(self) -> dict[str, Mapping[str, Entry]]:
        """As :meth:`look`, from the main thread. Raises :class:`RunError` when the DHT does not answer."""
        try:
            return self._node.call(self.look(), LOOK_TIMEOUT)
        except TimeoutError:
            raise RunError("the swarm's directory does not answer") from None

    async def look(self) -> dict[str, Mapping[str, Entry]]:
        """The newest records by run and peer id until they expire, those of peers that left included.

        On the network thread. Raises what hivemind raises when the DHT does not answer: for no run that had members.
        """
        followed = set(self._readers)
        fresh = sorted(await self._runs() - followed)
        # any peer can write names: a random choice keeps one writer from displacing the others for long
        places = max(TRIED_RUNS if self._began else 0, WATCHED_RUNS - len(self._readers))
        for run in random.sample(fresh, min(places, len(fresh))):
            self._readers[run] = Reader(self._node, run, self._foreign)
        self._began |= bool(fresh)
        failure = await self._read_all([*self._readers.values()])
        found: dict[str, Mapping[str, Entry]] = {
            run: dict(reader.known) for run, reader in self._readers.items() if reader.known
        }
        if len(found) > WATCHED_RUNS:
            found = {run: found[run] for run in likeliest(found, await self._networks(), WATCHED_RUNS, followed)}
        self._readers = {run: reader for run, reader in self._readers.items() if run in found}
        if failure is not None:
            raise failure
        return found

    async def _read_all(self, readers: Sequence[Reader]) -> Exception | None:
        """All at once; one that fails keeps what it has. Returns why, when all have failed that had members."""
        judged = [reader for reader in readers if reader.known] or readers

        async def read(reader: Reader) -> Exception | None:
            try:
                async with asyncio.timeout(RUN_TIMEOUT):
                    await reader.look(ONLOOKER_READS)
            except Exception as error:  # noqa: BLE001 - whatever hivemind raises, the next look may be better
                return error
            return None

        failures = dict(zip(readers, await together(map(read, readers)), strict=True))
        reasons = [failures[reader] for reader in judged]
        return None if None in reasons else next(iter(reasons), None)

    async def _networks(self) -> dict[str, set[str]]:
        """From which networks the connected peers come, by id."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(RPC_TIMEOUT):
                return {str(it.peer_id): networks_of(map(str, it.addrs)) for it in await self._node.p2p.list_peers()}
        return {}

    async def _runs(self) -> set[str]:
        """Names of runs that members of the DHT have written. A node tells what is new: anybody can fill the key."""
        now = clock.unix()
        self._named = {subkey: it for subkey, it in self._named.items() if it.expires > now}
        async with asyncio.timeout(2 * RPC_TIMEOUT):
            keepers = await search.read(self._node.dht, records.RUNS, self._named, anchors=self._node.anchors())
        self.alone = all(it == self._node.dht.peer_id for it in keepers)
        return {it.text for it in self._named.values() if re.fullmatch(NAME, it.text)}
