"""The directory: this peer's record in the DHT, and the members that the other records name.

A peer writes one record and reads a bounded number of buckets a period, whatever the size of the swarm.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from peer.logs import get_logger
from peer.swarm import directory, records
from peer.swarm.directory import Bucket
from peer.swarm.node import RPC_TIMEOUT, Node
from peer.swarm.records import MemberRecord

log = get_logger("members")

WIDE_PERIODS = 12  # between two looks at all levels of the directory


class Members:
    """Announce this peer and keep the list of the others. ``describe`` makes this peer's current record."""

    def __init__(self, node: Node, run: str, describe: Callable[[], MemberRecord]) -> None:
        self._node, self._run, self._describe = node, run, describe
        self._known: dict[str, tuple[MemberRecord, float]] = {}  # by peer id, with its expiration in unix seconds
        self._expiration = 0.0
        self._estimate = 1.0  # members of the swarm
        self._periods = 0
        self._written: list[Bucket] = []
        self._chance = random.Random()

    # -- from the main thread

    def start(self) -> None:
        """Announce from now on, until :meth:`leave`."""
        self._node.spawn(self._keep_announcing())

    def refresh_all(self) -> list[MemberRecord]:
        """Read many buckets now, all of a small swarm, and return the live members, this peer left out."""
        self._node.call(self._look_around(), 8 * RPC_TIMEOUT)
        return self.live()

    def announce(self) -> None:
        """Write this peer's record now."""
        self._node.call(self._store(self._describe()), 2 * RPC_TIMEOUT)

    def leave(self) -> None:
        """Withdraw this peer's record, so that nobody looks for it any more."""
        gone = self._describe().model_copy(update={"state": "left"})
        self._node.call(self._store(gone), 2 * RPC_TIMEOUT)

    # -- from any thread

    def live(self, *, since: float = 0.0) -> list[MemberRecord]:
        """Members whose record has not expired and was written after ``since`` (unix seconds), this peer left out.

        The record of one that was killed lives on for ``records.LIFETIME``.
        """
        after = max(time.time(), since + records.LIFETIME)
        return [record for record, expires in list(self._known.values()) if expires > after and record.state != "left"]

    def name_of(self, peer_id: str) -> str:
        """As its record has it, or the end of its id."""
        known = self._known.get(peer_id)
        return known[0].name if known is not None else peer_id[-6:]

    def forget(self, peer_id: str) -> None:
        """Drop a member that does not answer until its next record is read."""
        self._known.pop(peer_id, None)

    # -- on the network thread

    async def _keep_announcing(self) -> None:
        while True:
            began = time.monotonic()
            done = await asyncio.gather(self._store(self._describe()), self._read_some(), return_exceptions=True)
            for error in done:  # whatever hivemind raises, the next period may be better
                if isinstance(error, BaseException):
                    log.warning("the directory does not answer, trying again: %s", str(error) or type(error).__name__)
            pause = records.ANNOUNCE_SECONDS * random.uniform(0.8, 1.2) - (time.monotonic() - began)
            await asyncio.sleep(max(0.5, pause))

    async def _store(self, record: MemberRecord) -> None:
        # a record with an expiration that is not later than the one it replaces is rejected
        self._expiration = max(time.time() + records.LIFETIME, self._expiration + 0.01)
        before, self._written = self._written, directory.writes(self._node.peer_id, self._estimate)
        buckets = {*before, *self._written} if record.state == "left" else self._written
        text = records.encode(record)
        async with asyncio.timeout(2 * RPC_TIMEOUT):
            await self._node.dht.store_many(
                [records.members_key(self._run, bucket) for bucket in buckets],
                [text] * len(buckets),
                expiration_time=self._expiration,
                subkeys=[self._node.subkey] * len(buckets),
            )

    async def _read_some(self) -> None:
        self._periods += 1
        near = self._estimate if self._periods % WIDE_PERIODS else None
        probes = directory.probes(self._node.peer_id, near)
        found = await self._read([*directory.reads(self._estimate, directory.READS, self._chance), *probes])
        self._estimate = directory.smoothed(self._estimate, directory.estimate(found))

    async def _look_around(self) -> None:
        self._estimate = directory.estimate(await self._read(directory.probes(self._node.peer_id)))
        await self._read(directory.reads(self._estimate, directory.WELCOME, self._chance))

    async def _read(self, buckets: Sequence[Bucket]) -> dict[Bucket, int]:
        """Take in the records of these buckets; returns how many each has, this peer's own left out."""
        keys = {records.members_key(self._run, bucket): bucket for bucket in buckets}
        async with asyncio.timeout(3 * RPC_TIMEOUT):
            found = await self._node.dht.get_many(list(keys), sufficient_expiration_time=float("inf"))
        now, counts = time.time(), dict.fromkeys(buckets, 0)
        for key, answer in found.items():
            if answer is None or not isinstance(answer.value, dict):
                continue
            for subkey, entry in answer.value.items():
                record = records.decode(subkey, entry.value)
                if record is None or record.peer_id == self._node.peer_id:
                    continue
                known = self._known.get(record.peer_id)
                if known is None or known[1] < entry.expiration_time:
                    self._known[record.peer_id] = (record, entry.expiration_time)
                counts[keys[key]] += record.state != "left" and entry.expiration_time > now
        self._known = {key: item for key, item in self._known.items() if item[1] > now}
        return counts
