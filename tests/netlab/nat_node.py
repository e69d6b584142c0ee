"""A bare node for test_nat.py: which addresses does it announce, and by which connections does it reach another node?

python -m tests.netlab.nat_node KEY HOST PORT REACH [INITIAL ...]
It prints a line of JSON, {"id": ..., "addresses": [...]}. Then it reads lines, each with a peer's id and address. For
each line it sends BYTES to that peer and prints the addresses of its connections to the peer; none if sending failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from peer.p2p import identity
from peer.p2p.addresses import is_circuit
from peer.p2p.dial import disconnect
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream, StreamLost

PROTOCOL = "test/sink/1"
BYTES = 1 << 20  # the daemon's own relay would cut a connection at 128 KiB
SECONDS = 30.0
PUNCHED = 3.0  # seconds for libp2p to punch a hole


async def sink(stream: Stream) -> None:
    await stream.read_into(memoryview(bytearray(BYTES)), SECONDS)
    await stream.write(b"!", SECONDS)
    await stream.until_closed(SECONDS)
    stream.close()


async def ways(node: Node, peer_id: str) -> list[str]:
    """Addresses of the connections to a peer."""
    peers = [it for it in await node.p2p.list_peers() if it.peer_id.to_base58() == peer_id]
    return [str(address) for it in peers for address in it.addrs]


async def send(node: Node, peer_id: str, place: str) -> list[str]:
    if all(map(is_circuit, await ways(node, peer_id))):
        await disconnect(node.p2p, peer_id)  # libp2p tries hole punching once per connection
    try:
        stream = await node.open(peer_id, PROTOCOL, [place])
        await stream.write(bytes(BYTES), SECONDS)
        await stream.read_into(memoryview(bytearray(1)), SECONDS)
    except (StreamLost, TimeoutError):
        node.hang_up(peer_id)
        return []
    stream.close()
    await asyncio.sleep(PUNCHED)
    return await ways(node, peer_id)


def main() -> None:
    key, host, port, reach, *initial = sys.argv[1:]
    identity.load_or_create(Path(key))
    node = Node(NodeSettings(Path(key), host, int(port), initial_peers=tuple(initial), reach=reach))  # type: ignore[arg-type]
    try:
        node.start()
        node.call(node.serve(PROTOCOL, sink), SECONDS)
        print(json.dumps({"id": node.peer_id, "addresses": node.addresses}), flush=True)
        for line in sys.stdin:
            print(json.dumps(node.call(send(node, *line.split()), 2 * SECONDS)), flush=True)
    finally:
        node.stop()


if __name__ == "__main__":
    main()
