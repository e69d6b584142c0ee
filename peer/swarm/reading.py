"""What the directory holds, as checked records: for members (members.py) and for onlookers (observer.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from peer.swarm import records
from peer.swarm.directory import Bucket
from peer.swarm.node import RPC_TIMEOUT, Node
from peer.swarm.records import MemberRecord


class Entry(NamedTuple):
    """A member's record; ``expires`` in unix seconds of its clock."""

    record: MemberRecord
    expires: float


def is_live(entry: Entry, now: float) -> bool:
    """Has neither expired nor been withdrawn."""
    return entry.expires > now and entry.record.state != "left"


async def read_buckets(node: Node, run: str, buckets: Sequence[Bucket]) -> dict[Bucket, list[Entry]]:
    """The records in each of these buckets, this node's own left out. Raises what hivemind raises."""
    keys = {records.members_key(run, bucket): bucket for bucket in buckets}
    entries: dict[Bucket, list[Entry]] = {bucket: [] for bucket in buckets}
    async with asyncio.timeout(3 * RPC_TIMEOUT):
        found = await node.dht.get_many(list(keys), sufficient_expiration_time=float("inf"))
    for key, answer in found.items():
        if answer is None or not isinstance(answer.value, dict):
            continue
        for subkey, entry in answer.value.items():
            record = records.decode(subkey, entry.value)
            if record is not None and record.peer_id != node.peer_id:
                entries[keys[key]].append(Entry(record, entry.expiration_time))
    return entries


async def read_runs(node: Node) -> set[str]:
    """Names of the runs that members of the DHT speak of."""
    async with asyncio.timeout(3 * RPC_TIMEOUT):
        answer = await node.dht.get(records.RUNS, sufficient_expiration_time=float("inf"))
    if answer is None or not isinstance(answer.value, dict):
        return set()
    names = (records.decode_run(entry.value) for entry in answer.value.values())
    return {name for name in names if name is not None}
