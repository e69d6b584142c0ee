"""A stranger that stores in the DHT what no member would.

python -m tests.swarm.programs.packets ADDRESS [ADDRESS ...]
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import StoreRequest
from hivemind.utils.multiaddr import Multiaddr

from peer.p2p.addresses import owner_of
from peer.swarm.directory import buckets, records
from tests.swarm.support.packets import nested

TEXT = msgpack.packb("x")
DICTIONARY = 0x50  # hivemind's extension type of several records


def packets(now: float) -> list[tuple[bytes, bytes, float]]:
    """Subkey, value and expiration of each."""
    soon, plain = now + 20, DHTProtocol.IS_REGULAR_VALUE
    inside = msgpack.packb([None, soon, [["x", nested(300), soon], [["no", "key"], b"", soon]]])
    return [
        (nested(300), TEXT, soon),
        (TEXT, nested(300), soon),
        (TEXT, b"\xc1", soon),
        (plain, nested(300), soon),
        (plain, TEXT, soon),
        (DHTProtocol.IS_DICTIONARY, nested(300, DICTIONARY), soon),
        (DHTProtocol.IS_DICTIONARY, msgpack.packb(msgpack.ExtType(DICTIONARY, inside)), soon),
        (msgpack.packb("far"), TEXT, 1e11),
        (msgpack.packb("large"), msgpack.packb("x" * 500_000), soon),
    ]


async def main(addresses: list[str]) -> None:
    p2p = await P2P.create(initial_peers=[Multiaddr(it) for it in addresses])
    node = await DHTNode.create(p2p, initial_peers=addresses, client_mode=True)
    keys = [records.members_key("demo", bucket) for bucket in buckets.own_buckets(str(p2p.peer_id))] + [records.RUNS]
    for address in addresses:
        stub = node.protocol.get_stub(PeerID.from_base58(owner_of(address)))
        for key in keys:
            for subkey, value, expires in packets(time.time()):
                place = DHTID.generate(source=key).to_bytes()
                request = StoreRequest(
                    keys=[place], subkeys=[subkey], values=[value], expiration_time=[expires], in_cache=[False]
                )
                try:
                    answer = (await stub.rpc_store(request, timeout=5.0)).store_ok
                except Exception as error:  # noqa: BLE001 - every failure has its own type
                    answer = type(error).__name__
                print("stored" if answer == [True] else "refused", flush=True)
    await node.shutdown()
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
