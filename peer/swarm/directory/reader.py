"""What the directory holds, as checked records: for members (directory.py) and for onlookers (observer.py)."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from peer import __version__
from peer.logs import get_logger
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.swarm.directory import buckets as directory
from peer.swarm.directory import records
from peer.swarm.directory.buckets import Bucket
from peer.swarm.directory.records import MemberRecord

log = get_logger("members")

BEAM = 8  # nodes nearest to a key that are asked, of which five keep it; each answers with all that it has
LOOKS = 3  # at a directory that seems empty and of which a node has not answered
FOREIGN_PEERS = 1000  # of other versions that are named in the log


class Entry(NamedTuple):
    """A member's record; ``expires`` in unix seconds of its clock."""

    record: MemberRecord
    expires: float


def is_live(entry: Entry, now: float) -> bool:
    """Has neither expired nor been withdrawn."""
    return entry.expires > now and entry.record.state != "left"


class Reader:
    """What is known of one run: the newest record of each peer, until it expires, and about how many there are.

    Belongs to the network thread; ``known`` may be read by any.
    """

    def __init__(self, node: Node, run: str) -> None:
        self._node, self._run = node, run
        self.known: dict[str, Entry] = {}  # by peer id
        self._size = directory.Size()
        self.chance = random.Random()
        self._foreign: set[object] = set()  # subkeys of other versions' records

    async def look(self, count: int) -> None:
        """Read ``count`` buckets, and now and then one of each level that others may use."""
        self._size.learn(await self._take_in(self._size.look(self._node.peer_id, count, self.chance)))

    async def look_around(self, count: int) -> None:
        """As a newcomer: find out how many there are, then read ``count`` buckets."""
        for _ in range(LOOKS):
            found = await self._take_in(directory.probes(self._node.peer_id))
            self._size = directory.Size(directory.estimate(found))
            await self._take_in(directory.reads(self.members, count, self.chance))
            if self.known or not await self._node.asked_in_vain():
                return

    @property
    def members(self) -> float:
        """How many there are, about."""
        return self._size.members

    async def _take_in(self, buckets: Sequence[Bucket]) -> dict[Bucket, int]:
        """Returns how many others live in each of these buckets."""
        found = await self._read(buckets)
        now = time.time()
        for entry in itertools.chain.from_iterable(found.values()):
            known = self.known.get(entry.record.peer_id)
            if known is None or known.expires < entry.expires:
                self.known[entry.record.peer_id] = entry
        self.known = {key: entry for key, entry in self.known.items() if entry.expires > now}
        return {bucket: sum(is_live(entry, now) for entry in entries) for bucket, entries in found.items()}

    async def _read(self, buckets: Sequence[Bucket]) -> dict[Bucket, list[Entry]]:
        """The records in each of these buckets, this node's own left out. Raises what hivemind raises."""
        keys = {records.members_key(self._run, bucket): bucket for bucket in buckets}
        entries: dict[Bucket, list[Entry]] = {bucket: [] for bucket in buckets}
        async with asyncio.timeout(3 * RPC_TIMEOUT):
            found = await self._node.dht.get_many(list(keys), sufficient_expiration_time=float("inf"), beam_size=BEAM)
        for key, answer in found.items():
            if answer is None or not isinstance(answer.value, dict):
                continue
            for subkey, entry in answer.value.items():
                record = records.decode(subkey, entry.value)
                if record is None:
                    self._warn_of_version(subkey, entry.value)
                elif record.peer_id != self._node.peer_id:
                    entries[keys[key]].append(Entry(record, entry.expiration_time))
        return entries

    def _warn_of_version(self, subkey: object, value: object) -> None:
        """Say once for each peer that it runs another version; nothing else in its record is believed."""
        foreign = records.program_of(subkey, value)
        if foreign is None or subkey == self._node.subkey:
            return
        if subkey not in self._foreign and len(self._foreign) < FOREIGN_PEERS:
            self._foreign.add(subkey)
            log.warning(
                "peer %s runs version %s, this is %s, and they do not understand each other: update the older one",
                *(*foreign, __version__),
            )


async def read_runs(node: Node) -> set[str]:
    """Names of the runs that members of the DHT speak of."""
    async with asyncio.timeout(3 * RPC_TIMEOUT):
        answer = await node.dht.get(records.RUNS, sufficient_expiration_time=float("inf"))
    if answer is None or not isinstance(answer.value, dict):
        return set()
    names = (records.decode_run(entry.value) for entry in answer.value.values())
    return {name for name in names if name is not None}
