"""hivemind's DHT, as far as the product uses it: records by key and subkey at the nodes nearest to the key.

A node knows those that it has asked or that have asked it. One that does not answer is forgotten until a ping, and
counted in the blacklist until a search finds that it answers, as hivemind does it. An equal or older record is
rejected. In an invited swarm two nodes answer each other when each admits the other, and a list of revocations is kept
by those who accept it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from peer.errors import RunError
from peer.p2p.admission.dht_rules import REVOCATIONS, decode_revocations
from peer.p2p.admission.invitation import Admission
from peer.p2p.dht.search import COPIES, FINGERPRINT_BYTES, FIRST_NODES, NEIGHBOURS, SAID, Known, fingerprint, id_of
from peer.p2p.dial import parsed_id
from tests.simulated.p2p.network import CALL, Host, Network
from tests.simulated.runtime import EPOCH

TIMEOUT = 2.0  # seconds for one request
PLAIN = ""  # the subkey of a value that has none
SIGNED, NODE = 740, 58  # bytes of a record's public key and signature, which the simulation leaves out; of a node


class Value(NamedTuple):
    """hivemind's ValueWithExpiration. ``value``: packed."""

    value: Any
    expiration_time: float


@lru_cache(10_000)
def _place(peer_id: str) -> DHTID:
    return DHTID.generate(source=peer_id)


class SimulatedDHT:
    """The node of one host. ``everyone``: the nodes by host id. ``client``: it keeps no records for others."""

    def __init__(
        self,
        network: Network,
        host: Host,
        everyone: dict[str, SimulatedDHT],
        admission: Admission | None = None,
        client: bool = False,
    ) -> None:
        self.network, self.host, self._everyone, self._admission = network, host, everyone, admission
        self.peer_id, self.node_id = parsed_id(host.peer_id), _place(host.peer_id)
        self.known: dict[str, str] = {}  # hivemind's routing table: ids by place
        self._near: dict[DHTID, list[str]] = {}  # by key, until another node becomes known
        self.records: dict[DHTID, dict[str, Value]] = {}
        silent = Counter[PeerID]()
        self.blacklist = SimpleNamespace(ban_counter=silent, clear=silent.clear, register_success=self._has_answered)
        table = SimpleNamespace(uid_to_peer_id=self.known, get_nearest_neighbors=self._neighbours)
        self.protocol = SimpleNamespace(
            call_ping=self._ping,
            call_store=self._call_store,
            routing_table=table,
            storage=SimpleNamespace(get=self._own, store_subkey=self._store_own),
            serializer=MSGPackSerializer,
            record_validator=SimpleNamespace(sign_value=lambda record: record.value),
            client_mode=client,
        )
        everyone[host.peer_id] = self

    async def join(self, through: Sequence[str]) -> None:
        """Learn of others from these nodes, by id. Raises :class:`RunError` when none answers, as ``join_dht``."""
        answers = await self._ask(through)
        for node in answers.values():
            self._learn([*node.known, node.host.peer_id])
        if through and not answers:
            raise RunError("none of the initial peers answers")

    async def store(self, key: str, value: str, expiration_time: float) -> None:
        for node in (await self._ask(self._nearest(id_of(key))[:COPIES])).values():
            node._keep(id_of(key), PLAIN, Value(MSGPackSerializer.dumps(value), expiration_time), self._now())

    async def get_many(self, keys: Sequence[str], **_: Any) -> dict[str, Value | None]:
        nearest = {key: self._nearest(id_of(key))[:COPIES] for key in keys}
        answers = await self._ask(list(chain.from_iterable(nearest.values())))
        for node in answers.values():
            self._learn(islice(node.known, COPIES))
        return {key: self._newest(id_of(key), [answers[it] for it in nearest[key] if it in answers]) for key in keys}

    async def get(self, key: str, **_: Any) -> Value | None:
        return (await self.get_many([key]))[key]

    async def shutdown(self) -> None:
        self.known.clear()
        self._near.clear()

    # -- what peer/p2p/dht/search.py uses

    def _neighbours(self, key: DHTID, k: int, exclude: DHTID | None = None) -> list[tuple[DHTID, PeerID]]:
        nearest = [it for it in self._nearest(key)[:k] if it != self.host.peer_id]
        return [(_place(it), parsed_id(it)) for it in nearest]

    async def _call_find_with_blacklist(self, peer_id: PeerID, keys: Sequence[DHTID]) -> dict[DHTID, Any] | None:
        answers = await self._ask([peer_id.to_base58()])
        said = SAID.get() or Known()
        known = {said.fingerprints[at : at + FINGERPRINT_BYTES] for at in range(0, len(said.fingerprints), 8)}
        for node in answers.values():
            self._has_answered(peer_id)
            self._sent("find", CALL + 100 + len(said.fingerprints))
            return {key: node._found(key, known, said.everything, self.node_id) for key in keys}
        return None

    def _found(self, key: DHTID, known: Collection[bytes], nothing: bool, asker: DHTID) -> tuple[Value | None, Any]:
        nodes = {place: it for place, it in self._neighbours(key, NEIGHBOURS + 1) if place != asker}
        live = self._own(key)
        held = {} if nothing or live is None else live.value
        rows = [(subkey, *it) for subkey, it in held.items() if fingerprint(key.to_bytes(), subkey, it[1]) not in known]
        size = sum(len(subkey) + len(value) + SIGNED for subkey, value, _ in rows)
        self._sent("answer", size + NODE * len(nodes))
        found = {subkey: Value(value, expires) for subkey, value, expires in rows}
        return (Value(found, max(it.expiration_time for it in found.values())) if found else None), nodes

    async def _call_store(self, peer_id: PeerID, keys: Any, values: Any, expires: Any, subkeys: Any) -> Any:
        for node in (await self._ask([peer_id.to_base58()])).values():
            for row in zip(keys, subkeys, values, expires, strict=True):
                self._sent("store", CALL + len(row[1]) + len(row[2]) + SIGNED)
                node._store_own(*row)
            return [True] * len(keys)
        return None

    def _own(self, key: DHTID) -> Value | None:
        return self._newest_packed(key, [self])

    def _store_own(self, key: DHTID, subkey: str, value: bytes, expires: float) -> None:
        self._keep(key, subkey, Value(value, expires), self._now())

    def _sent(self, kind: str, size: int) -> None:
        self.network.sent[f"DHT {kind}"] += size

    def _now(self) -> float:
        return EPOCH + self.network.loop.time()

    # -- requests

    def _learn(self, peer_ids: Iterable[str]) -> None:
        new = [it for it in peer_ids if it not in self.known and it != self.host.peer_id]
        if new:
            self.known |= {it: it for it in new}
            self._near.clear()

    def _forget(self, peer_id: str) -> None:
        if self.known.pop(peer_id, None) is not None:
            self._near.clear()

    def _nearest(self, key: DHTID) -> list[str]:
        if key not in self._near:
            nodes = [*self.known, *([] if self.protocol.client_mode else [self.host.peer_id])]
            self._near[key] = nsmallest(FIRST_NODES + 1, nodes, key=lambda it: key ^ _place(it))
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
                self.blacklist.ban_counter[parsed_id(other.peer_id)] += 1
                continue
            node = answers[other.peer_id] = self._everyone[other.peer_id]
            self._learn([other.peer_id])
            if not self.protocol.client_mode:
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

    def _keep(self, key: DHTID, subkey: str, value: Value, now: float) -> None:
        if key == id_of(REVOCATIONS):
            found = decode_revocations(MSGPackSerializer.loads(value.value))
            if self._admission is None or found is None or not self._admission.learn(found):
                return
        kept = self.records.setdefault(key, {})
        for stale in [name for name, held in kept.items() if held.expiration_time <= now]:
            del kept[stale]
        if subkey not in kept or kept[subkey].expiration_time < value.expiration_time:
            kept[subkey] = value

    def _newest_packed(self, key: DHTID, nodes: Sequence[SimulatedDHT]) -> Value | None:
        newest: dict[str, Value] = {}
        now = self._now()
        for node in nodes:
            for subkey, held in node.records.get(key, {}).items():
                if held.expiration_time > now and (subkey not in newest or newest[subkey][1] < held.expiration_time):
                    newest[subkey] = held
        if PLAIN in newest:
            return newest[PLAIN]
        return Value(newest, max(it.expiration_time for it in newest.values())) if newest else None

    def _newest(self, key: DHTID, nodes: Sequence[SimulatedDHT]) -> Value | None:
        """As hivemind gives it to who asks: unpacked."""
        found = self._newest_packed(key, nodes)
        if found is None or isinstance(found.value, bytes):
            return found and Value(MSGPackSerializer.loads(found.value), found.expiration_time)
        texts = {key: Value(MSGPackSerializer.loads(it.value), it.expiration_time) for key, it in found.value.items()}
        return Value(texts, found.expiration_time)

    async def _ping(self, peer_id: PeerID) -> PeerID | None:
        answers = await self._ask([peer_id.to_base58()])
        for node in answers.values():
            self._learn(node.known)
        return peer_id if answers else None

    def _has_answered(self, peer_id: PeerID) -> None:
        self.blacklist.ban_counter.pop(peer_id, None)
