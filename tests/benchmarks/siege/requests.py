"""Requests to the DHT that no member sends, for ever."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import FindRequest, StoreRequest
from hivemind.utils import MSGPackSerializer

from dht_bootstrap import owner
from peer.p2p import identity
from peer.p2p.admission.dht_rules import REVOCATIONS, REVOCATIONS_LIFETIME
from peer.p2p.admission.invitation import Invitation
from peer.p2p.dht.authors import Author
from peer.swarm.directory import buckets, records
from tests.swarm.programs.packets import packets

RUN = "demo"
GHOSTS = 6120
REQUESTS = ("nested", "ghosts", "forged", "stores", "replayed", "strange", "revoked")
Row = tuple[bytes, bytes, float]  # subkey, value and expiration


class Attacker:
    """``folder``: the swarm's, with the invitations of its members; ``author`` has its own certificate, if any."""

    def __init__(self, author: Author, peer_id: PeerID, node: DHTNode, targets: list[PeerID], folder: Path) -> None:
        self.author, self.me, self._node = author, peer_id.to_base58(), node
        self._targets, self._folder = targets, folder

    # -- each for ever

    async def nested(self) -> AsyncIterator[StoreRequest]:
        """Threat 1, and other records that no member writes."""
        while True:
            for row in packets(time.time()):
                for bucket in buckets.own_buckets(self.me)[:3]:
                    yield self._store(records.members_key(RUN, bucket), [row])

    async def ghosts(self) -> AsyncIterator[StoreRequest]:
        """Threat 8: members that are not there."""
        for number in count():
            peer_id = f"Qm{number % GHOSTS:044}".replace("0", "1")
            row = (msgpack.packb(peer_id + self.author.tag), msgpack.packb(_record(peer_id)), time.time() + 50)
            for bucket in buckets.own_buckets(peer_id)[:8]:
                yield self._store(records.members_key(RUN, bucket), [row])

    async def forged(self) -> AsyncIterator[StoreRequest]:
        """Threats 9 and 12: records in the names of members, later than theirs, and of ids that nobody invited."""
        key = self._folder / "nobody.key"
        its_id, nobody = identity.load_or_create(key), Author(key)
        members = [(it.to_base58(), self.author) for it in self._targets]
        for peer_id, author in cycle([*members, (its_id, nobody)]):
            for bucket in buckets.own_buckets(peer_id)[:3]:
                place = records.members_key(RUN, bucket)
                yield self._store(place, [_signed(author, place, peer_id, _record(peer_id), time.time() + 55)])

    async def stores(self) -> AsyncIterator[StoreRequest]:
        """Threat 10: records of its own under any number of keys."""
        for number in count():
            key = f"flood/{number}"
            yield self._store(key, [_signed(self.author, key, self.me, "x" * 900, time.time() + 50)])

    async def replayed(self) -> AsyncIterator[StoreRequest]:
        """Threat 15: what members have signed before, again, and the owner's older list of revocations far ahead."""
        key = records.members_key(RUN, buckets.own_buckets(self.me)[0])
        find = self._with_pass(FindRequest(keys=[DHTID.generate(source=key).to_bytes()]))
        answer = await self._node.protocol.get_stub(self._targets[0]).rpc_find(find, timeout=5.0)
        found = [MSGPackSerializer.loads(it.value) for it in answer.results if it.value]
        old = [(msgpack.packb(who), *it) for kept in found for who, it in kept.items()]
        print(f"{len(old)} records of members", flush=True)
        book = self._folder / "owner.key"
        listed = owner.load_or_create(book).revoke(1, []).model_dump_json() if book.exists() else "{}"
        while True:
            for row in old:
                yield self._store(key, [row])
            ahead = time.time() + REVOCATIONS_LIFETIME
            yield self._store(REVOCATIONS, [(DHTProtocol.IS_REGULAR_VALUE, msgpack.packb(listed), ahead)])

    async def strange(self) -> AsyncIterator[StoreRequest]:
        """Threats 17 to 19: values, addresses and names that hurt who shows them."""
        said = json.loads(_record(self.me))
        changes: list[dict[str, Any]] = [
            {"step": 10**400},
            {"tokens_per_second": 1.7e308, "report": {"seconds": 1.7e308, "idle_seconds": 1.7e308}},
            {"metrics": "169.254.169.254:80"},
            {"metrics": "prometheus:9090"},
            {"name": "a\nWARNING forged \x1b[31mred"},
        ]
        for change in cycle(changes):
            key = records.members_key(RUN, buckets.own_buckets(self.me)[0])
            yield self._store(key, [_signed(self.author, key, self.me, json.dumps(said | change), time.time() + 20)])
            await asyncio.sleep(1.0)

    async def revoked(self) -> AsyncIterator[FindRequest | StoreRequest]:
        """Threat 11: it reads and writes with its own revoked certificate, and passes on those of members."""
        files = sorted(self._folder.glob("peer*.invitation"))
        others = [Invitation.model_validate_json(it.read_bytes()).certificate.model_dump_json() for it in files]
        key = records.members_key(RUN, buckets.own_buckets(self.me)[0])
        find = DHTID.generate(source=key).to_bytes()
        for certificate in cycle([self.author.certificate, *others]):
            yield self._with_pass(FindRequest(keys=[find]), certificate)
            row = _signed(self.author, key, self.me, _record(self.me), time.time() + 25)
            yield self._with_pass(self._store(key, [row]), certificate)

    # -- how they are made

    def _store(self, key: str, rows: list[Row]) -> StoreRequest:
        request = StoreRequest(
            keys=[DHTID.generate(source=key).to_bytes()] * len(rows),
            subkeys=[subkey for subkey, _, _ in rows],
            values=[value for _, value, _ in rows],
            expiration_time=[expires for _, _, expires in rows],
            in_cache=[False] * len(rows),
        )
        return self._with_pass(request)

    def _with_pass(self, request: Any, certificate: str | None = None) -> Any:
        request.auth.client_access_token.username = self.author.certificate if certificate is None else certificate
        return request


def _signed(author: Author, key: str, peer_id: str, text: str, expires: float) -> Row:
    subkey = msgpack.packb(peer_id + author.tag)
    blank = DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, msgpack.packb(text), expires)
    return subkey, author.validator.sign_value(blank), expires


def _record(peer_id: str) -> str:
    record = records.MemberRecord(
        peer_id=peer_id,
        name="ghost",
        addresses=["/ip4/203.0.113.7/tcp/31337"],
        config="0" * 16,
        state="training",
        step=100,
        round=10,
        tokens_per_second=1.0,
        metrics=None,
    )
    return record.model_dump_json(exclude_defaults=True)
