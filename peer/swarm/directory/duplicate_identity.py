"""Finds another live process with this peer's identity: a copied key file or invitation.

After a crash this peer's own last record is still valid. So a record counts only when a process listens at its address
and the record is written again during the search.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from peer import clock
from peer.errors import UserError
from peer.p2p.addresses import is_circuit, tcp_of
from peer.p2p.dht.authors import owner_of_subkey
from peer.p2p.node import RPC_TIMEOUT, Node
from peer.swarm.directory import buckets, records
from peer.swarm.directory.records import MemberRecord

DUPLICATE_LOOK = records.WRITTEN_FOR + 1.6 * records.ANNOUNCE_SECONDS  # seconds in which a record is written again
DUPLICATE_TIMEOUT = DUPLICATE_LOOK + 60.0  # seconds for a caller of :func:`duplicate_of`
LOOK_PAUSE = 2.0  # seconds between two looks
CONNECT_TIMEOUT = 2.0  # seconds


def require_alone(node: Node, run: str) -> None:
    """Raises :class:`UserError` when another live process has this node's identity. From the main thread."""
    other = node.call(duplicate_of(node, run), DUPLICATE_TIMEOUT)
    if other is not None:
        raise UserError(
            f"a peer with the same identity is alive: {other.name} at {', '.join(other.addresses[:2])}; each peer "
            "needs a key of its own (peer.identity) or an invitation of its own (peer.invitation)"
        )


async def duplicate_of(node: Node, run: str, peer_id: str = "") -> MemberRecord | None:
    """The record of another live peer with this id, by default ``node``'s; ``None`` also if nobody answers."""
    peer_id = peer_id or node.peer_id
    keys = [records.members_key(run, bucket) for bucket in buckets.own_buckets(peer_id)]
    with contextlib.suppress(TimeoutError):
        found = await _own(node, keys, peer_id)
        if found is None or not await _listens(found[0].addresses, node.addresses):
            return None
        until = clock.monotonic() + DUPLICATE_LOOK
        while clock.monotonic() < until:
            await asyncio.sleep(LOOK_PAUSE)
            again = await _own(node, keys, peer_id)
            if again is not None and again[1] > found[1]:
                return again[0]
    return None


async def _own(node: Node, keys: Sequence[str], peer_id: str) -> tuple[MemberRecord, float] | None:
    """The newest record of ``peer_id``, with its expiration."""
    async with asyncio.timeout(3 * RPC_TIMEOUT):
        answers: dict[Any, Any] = await node.dht.get_many(list(keys), sufficient_expiration_time=float("inf"))
    entries = [
        (record, it.expiration_time)
        for answer in answers.values()
        if answer is not None and isinstance(answer.value, dict)
        for subkey, it in answer.value.items()
        if owner_of_subkey(subkey).peer_id == peer_id
        if (record := records.decode(subkey, it.value)) is not None and record.state != "left"
    ]
    return max(entries, key=lambda it: it[1], default=None)


async def _listens(addresses: Sequence[str], ours: Sequence[str]) -> bool:
    """Does another process accept a TCP connection at one of these multiaddrs? A relay's cannot be tested so."""
    own = {tcp_of(address) for address in ours}
    for address in addresses:
        if is_circuit(address):
            return True
        place = tcp_of(address)
        if place is None or place in own:
            continue
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, writer = await asyncio.open_connection(*place)
            writer.close()
            return True
    return False
