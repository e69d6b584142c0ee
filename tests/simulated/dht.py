"""hivemind's DHT, as far as the product uses it: records by key and subkey at the nodes nearest to the key.

A node knows those that it has asked or that have asked it. One that does not answer is forgotten and counted in the
blacklist until a ping, as hivemind does it. An equal or older record is rejected.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from hivemind.p2p import PeerID

from tests.simulated.network import Host, Network
from tests.simulated.runtime import EPOCH

COPIES = 5  # nodes that store a record
TIMEOUT = 2.0  # seconds for one request


class Value(NamedTuple):
    """hivemind's ValueWithExpiration."""

    value: Any
    expiration_time: float


class SimulatedDHT:
    """The node of one host. ``everyone``: the nodes by host id."""

    def __init__(self, network: Network, host: Host, everyone: dict[str, SimulatedDHT]) -> None:
        self.network, self.host, self._everyone = network, host, everyone
        self.known: dict[str, None] = {}
        self.records: dict[str, dict[str, Value]] = {}
        self.blacklist = SimpleNamespace(ban_counter=Counter[PeerID](), clear=self._forgive)
        self.protocol = SimpleNamespace(call_ping=self._ping)
        everyone[host.peer_id] = self

    async def join(self, through: Sequence[str]) -> None:
        """Learn of others from these nodes, by id. Raises when none answers."""
        answers = [await self._ask(peer_id) for peer_id in through]
        for node in [it for it in answers if it is not None]:
            self._learn([*node.known, node.host.peer_id])
        if through and not any(answers):
            raise TimeoutError("none of the initial peers answers")

    async def store_many(
        self,
        keys: Sequence[str],
        values: Sequence[str],
        expiration_time: Sequence[float],
        subkeys: Sequence[str],
        **_: Any,
    ) -> None:
        for key, value, expires, subkey in zip(keys, values, expiration_time, subkeys, strict=True):
            record = Value(value, expires)
            await asyncio.gather(*(self._store(node, key, subkey, record) for node in self._nearest(key)))

    async def get_many(self, keys: Sequence[str], **_: Any) -> dict[str, Value | None]:
        found = await asyncio.gather(*(self.get(key) for key in keys))
        return dict(zip(keys, found, strict=True))

    async def get(self, key: str, **_: Any) -> Value | None:
        answers = await asyncio.gather(*(self._ask(node) for node in self._nearest(key)))
        newest: dict[str, Value] = {}
        now = EPOCH + self.network.loop.time()
        for node in [it for it in answers if it is not None]:
            self._learn(list(node.known)[:COPIES])
            for subkey, held in node.records.get(key, {}).items():
                if held.expiration_time > now and (subkey not in newest or newest[subkey][1] < held.expiration_time):
                    newest[subkey] = held
        return Value(newest, max(it.expiration_time for it in newest.values())) if newest else None

    async def shutdown(self) -> None:
        self.known.clear()

    # -- requests

    def _learn(self, peer_ids: Sequence[str]) -> None:
        self.known |= dict.fromkeys(it for it in peer_ids if it != self.host.peer_id)

    def _nearest(self, key: str) -> list[str]:
        def distance(peer_id: str) -> bytes:
            return hashlib.sha1(f"{key}{peer_id}".encode()).digest()

        return sorted([*self.known, self.host.peer_id], key=distance)[:COPIES]

    async def _ask(self, peer_id: str) -> SimulatedDHT | None:
        """The node, once it has answered; ``None`` after ``TIMEOUT``."""
        if peer_id == self.host.peer_id:
            return self
        other = self.network.hosts[peer_id]
        await asyncio.sleep(2 * self.network.delay(self.host, other))
        process = other.process
        answers = other.alive and process is not None and not process.frozen
        if not answers or not self.network.reachable(self.host, other):
            await asyncio.sleep(TIMEOUT)
            self.known.pop(peer_id, None)
            self.blacklist.ban_counter[PeerID.from_base58(peer_id)] += 1
            return None
        node = self._everyone[peer_id]
        self._learn([peer_id])
        node._learn([self.host.peer_id])
        return node

    async def _store(self, peer_id: str, key: str, subkey: str, value: Value) -> None:
        node = await self._ask(peer_id)
        if node is None:
            return
        kept = node.records.setdefault(key, {})
        now = EPOCH + self.network.loop.time()
        for stale in [name for name, held in kept.items() if held.expiration_time <= now]:
            del kept[stale]
        if subkey not in kept or kept[subkey].expiration_time < value.expiration_time:
            kept[subkey] = value

    async def _ping(self, peer_id: PeerID) -> PeerID | None:
        node = await self._ask(peer_id.to_base58())
        if node is None:
            return None
        self.blacklist.ban_counter.pop(peer_id, None)
        self._learn(list(node.known))
        return peer_id

    def _forgive(self) -> None:
        self.blacklist.ban_counter.clear()
