"""The directory: this peer's record in the DHT, and the members that the other records name.

A peer writes one record and reads a bounded number of buckets a period, whatever the size of the swarm.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from peer.logs import get_logger
from peer.swarm import records
from peer.swarm.node import RPC_TIMEOUT, Node
from peer.swarm.records import MemberRecord

log = get_logger("members")
BUCKETS_A_PERIOD = 4


class Members:
    """Announce this peer and keep the list of the others. ``describe`` makes this peer's current record."""

    def __init__(self, node: Node, run: str, describe: Callable[[], MemberRecord]) -> None:
        self._node, self._run, self._describe = node, run, describe
        self._known: dict[str, tuple[MemberRecord, float]] = {}  # by peer id, with its expiration in unix seconds
        self._expiration = 0.0

    # -- from the main thread

    def start(self) -> None:
        """Announce from now on, until :meth:`leave`."""
        self._node.spawn(self._keep_announcing())

    def refresh_all(self) -> list[MemberRecord]:
        """Read every bucket now and return the live members, this peer left out."""
        self._node.call(self._read(range(records.BUCKETS)), 4 * RPC_TIMEOUT)
        return self.live()

    def leave(self) -> None:
        """Withdraw this peer's record, so that nobody looks for it any more."""
        gone = self._describe().model_copy(update={"state": "left"})
        self._node.call(self._store(gone), 2 * RPC_TIMEOUT)

    # -- from any thread

    def live(self) -> list[MemberRecord]:
        """Members whose record has not expired, this peer left out."""
        now = time.time()
        return [record for record, expires in list(self._known.values()) if expires > now and record.state != "left"]

    def forget(self, peer_id: str) -> None:
        """Drop a member that does not answer until its next record is read."""
        self._known.pop(peer_id, None)

    # -- on the network thread

    async def _keep_announcing(self) -> None:
        while True:
            began = time.monotonic()
            buckets = random.sample(range(records.BUCKETS), BUCKETS_A_PERIOD)
            done = await asyncio.gather(self._store(self._describe()), self._read(buckets), return_exceptions=True)
            for error in done:  # whatever hivemind raises, the next period may be better
                if isinstance(error, BaseException):
                    log.warning("the directory does not answer, trying again: %s", str(error) or type(error).__name__)
            pause = records.ANNOUNCE_SECONDS * random.uniform(0.8, 1.2) - (time.monotonic() - began)
            await asyncio.sleep(max(0.5, pause))

    async def _store(self, record: MemberRecord) -> None:
        # a record with an expiration that is not later than the one it replaces is rejected
        self._expiration = max(time.time() + records.LIFETIME, self._expiration + 0.01)
        key = records.members_key(self._run, records.bucket_of(record.peer_id))
        async with asyncio.timeout(2 * RPC_TIMEOUT):
            await self._node.dht.store(
                key, records.encode(record), expiration_time=self._expiration, subkey=record.peer_id
            )

    async def _read(self, buckets: Any) -> None:
        keys = [records.members_key(self._run, bucket) for bucket in buckets]
        async with asyncio.timeout(3 * RPC_TIMEOUT):
            found = await self._node.dht.get_many(keys, sufficient_expiration_time=float("inf"))
        for answer in found.values():
            if answer is None or not isinstance(answer.value, dict):
                continue
            for subkey, entry in answer.value.items():
                record = records.decode(subkey, entry.value)
                if record is not None and record.peer_id != self._node.peer_id:
                    self._known[record.peer_id] = (record, entry.expiration_time)
        now = time.time()
        self._known = {key: item for key, item in self._known.items() if item[1] > now}
