"""hivemind's DHT, as far as the product uses it: records by key and subkey at the nodes nearest to the key.

A node knows those that it has asked or that have asked it. One that does not answer is forgotten and counted in the
blacklist until a ping, as hivemind does it. An equal or older record is rejected. In an invited swarm two nodes answer
each other when each admits the other, and a list of revocations is kept by those who accept it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from hivemind.p2p import PeerID

from peer.errors import UserError
from peer.p2p.admission.dht_rules import REVOCATIONS, decode_revocations
from peer.p2p.admission.invitation import Admission
from tests.simulated.network import Host, Network
from tests.simulated.runtime import EPOCH

COPIES = 5  # nodes that store a record
TIMEOUT = 2.0  # seconds for one request
PLAIN = ""  # the subkey of a value that has none


class Value(NamedTuple):
    """hivemind's ValueWithExpiration."""

    value: Any
    expiration_time: float


@lru_cache(100_000)
def _distance(key: str, peer_id: str) -> bytes:
    return hashlib.sha1(f"{key}{peer_id}".encode()).digest()


class SimulatedDHT:
    """The node of one host. ``everyone``: the nodes by host id."""

    def __init__(
        self, network: Network, host: Host, everyone: dict[str, SimulatedDHT], admission: Admission | None = None
    ) -> None:
        self.network, self.host, self._everyone, self._admission = network, host, everyone, admission
        self.known: dict[str, str] = {}  # hivemind's routing table: ids by place
        self._near: dict[str, list[str]] = {}  # by key, until another node becomes known
        self.records: dict[str, dict[str, Value]] = {}
        self.blacklist = SimpleNamespace(ban_counter=Counter[PeerID](), clear=self._forgive)
        table = SimpleNamespace(uid_to_peer_id=self.known)
        self.protocol = SimpleNamespace(call_ping=self._ping, routing_table=table)
        everyone[host.peer_id] = self

    async def join(self, through: Sequence[str]) -> None:
        """Learn of others from these nodes, by id. Raises :class:`UserError` when none answers, as ``join_dht``."""
        answers = await self._ask(through)
        for node in answers.values():
            self._learn([*node.known, node.host.peer_id])
        if through and not answers:
            raise UserError("none of the initial peers answers")

    async def store_many(
        self,
        keys: Sequence[str],
        values: Sequence[str],
        expiration_time: Sequence[float],
        subkeys: Sequence[str],
        **_: Any,
    ) -> None:
        nearest = {key: self._nearest(key) for key in keys}
        answers = await self._ask(list(chain.from_iterable(nearest.values())))
        now = EPOCH + self.network.loop.time()
        for key, value, expires, subkey in zip(keys, values, expiration_time, subkeys, strict=True):
            for node in [answers[it] for it in nearest[key] if it in answers]:
                node._keep(key, subkey, Value(value, expires), now)

    async def store(self, key: str, value: str, expiration_time: float) -> None:
        await self.store_many([key], [value], [expiration_time], [PLAIN])

    async def get_many(self, keys: Sequence[str], **_: Any) -> dict[str, Value | None]:
        nearest = {key: self._nearest(key) for key in keys}
        answers = await self._ask(list(chain.from_iterable(nearest.values())))
        for node in answers.values():
            self._learn(islice(node.known, COPIES))
        return {key: self._newest(key, [answers[it] for it in nearest[key] if it in answers]) for key in keys}

    async def get(self, key: str, **_: Any) -> Value | None:
        return (await self.get_many([key]))[key]

    async def shutdown(self) -> None:
        self.known.clear()
        self._near.clear()

    # -- requests

    def _learn(self, peer_ids: Iterable[str]) -> None:
        new = [it for it in peer_ids if it not in self.known and it != self.host.peer_id]
        if new:
            self.known |= {it: it for it in new}
            self._near.clear()

    def _forget(self, peer_id: str) -> None:
        if self.known.pop(peer_id, None) is not None:
            self._near.clear()

    def _nearest(self, key: str) -> list[str]:
        if key not in self._near:
            self._near[key] = nsmallest(COPIES, [*self.known, self.host.peer_id], key=lambda it: _distance(key, it))
        return self._near[key]

    async def _ask(self, peer_ids: Sequence[str]) -> dict[str, SimulatedDHT]:
        """One request to each, at once: the nodes that answer. A silent one costs ``TIMEOUT``, and is forgotten."""
        others = [self.network.hosts[it] for it in dict.fromkeys(peer_ids) if it != self.host.peer_id]
        if others:
            await asyncio.sleep(2 * max(self.network.delay(self.host, other) for other in others))
        answers = {self.host.peer_id: self} if self.host.peer_id in peer_ids else {}
        silent = [other for other in others if not self._answers(other)]
        if silent:
            await asyncio.sleep(TIMEOUT)
        for other in others:
            if other in silent:
                self._forget(other.peer_id)
                self.blacklist.ban_counter[PeerID.from_base58(other.peer_id)] += 1
                continue
            node = answers[other.peer_id] = self._everyone[other.peer_id]
            self._learn([other.peer_id])
            node._learn([self.host.peer_id])
        return answers

    def _answers(self, other: Host) -> bool:
        process = other.process
        runs = process is not None and not process.dead and not process.frozen and other.peer_id in self._everyone
        if not runs or not self.network.reachable(self.host, other):
            return False
        node = self._everyone[other.peer_id]
        return self._admits(node) and node._admits(self)

    def _admits(self, other: SimulatedDHT) -> bool:
        if self._admission is None or other._admission is None:
            return self._admission is other._admission
        return not self._admission.objection(other._admission.own, other.host.peer_id)

    def _keep(self, key: str, subkey: str, value: Value, now: float) -> None:
        if key == REVOCATIONS:
            found = decode_revocations(value.value)
            if self._admission is None or found is None or not self._admission.learn(found):
                return
        kept = self.records.setdefault(key, {})
        for stale in [name for name, held in kept.items() if held.expiration_time <= now]:
            del kept[stale]
        if subkey not in kept or kept[subkey].expiration_time < value.expiration_time:
            kept[subkey] = value

    def _newest(self, key: str, nodes: Sequence[SimulatedDHT]) -> Value | None:
        newest: dict[str, Value] = {}
        now = EPOCH + self.network.loop.time()
        for node in nodes:
            for subkey, held in node.records.get(key, {}).items():
                if held.expiration_time > now and (subkey not in newest or newest[subkey][1] < held.expiration_time):
                    newest[subkey] = held
        if PLAIN in newest:
            return newest[PLAIN]
        return Value(newest, max(it.expiration_time for it in newest.values())) if newest else None

    async def _ping(self, peer_id: PeerID) -> PeerID | None:
        answers = await self._ask([peer_id.to_base58()])
        for node in answers.values():
            self.blacklist.ban_counter.pop(peer_id, None)
            self._learn(node.known)
        return peer_id if answers else None

    def _forgive(self) -> None:
        self.blacklist.ban_counter.clear()
