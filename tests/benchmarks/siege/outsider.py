"""An outsider that attacks the nodes at ADDRESS until it is ended: one process for one attack.

python -m tests.benchmarks.siege.outsider ATTACK KEY INVITATION ADDRESS [ADDRESS ...]

For half_open each ADDRESS is a port of this machine. It uses hivemind without our checks. KEY: the file of its
identity. INVITATION: a file, or - for none. It prints how many requests, streams or connections it has tried, and how
many were taken.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import FindRequest
from hivemind.utils.multiaddr import Multiaddr

from peer.p2p import identity
from peer.p2p.addresses import owner_of
from peer.p2p.admission.dht_rules import Authority
from peer.p2p.admission.invitation import Admission, accept
from peer.p2p.dht.authors import Author
from peer.p2p.reachability.circuit_messages import STOP
from tests.benchmarks.siege import streams
from tests.benchmarks.siege.ports import half_open
from tests.benchmarks.siege.requests import REQUESTS, Attacker
from tests.benchmarks.siege.streams import Tally

ABREAST = 32  # requests at once


async def ask_for_ever(attacker: Attacker, name: str, node: DHTNode, targets: list[PeerID], tally: Tally) -> None:
    """Each request goes to every target."""
    waiting: set[asyncio.Task[None]] = set()

    async def ask(request: Any, target: PeerID) -> None:
        stub = node.protocol.get_stub(target)
        try:
            if isinstance(request, FindRequest):
                answer = await stub.rpc_find(request, timeout=5.0)
                tally.count(any(it.value for it in answer.results))
            else:
                tally.count(any((await stub.rpc_store(request, timeout=5.0)).store_ok))
        except Exception as error:  # noqa: BLE001 - every failure has its own type
            if tally.tried < 3:
                print(type(error).__name__, error, flush=True)
            tally.count(0)

    async for request in getattr(attacker, name)():
        for target in targets:
            waiting.add(asyncio.ensure_future(ask(request, target)))
            if len(waiting) >= ABREAST:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


async def for_ever(attack: Callable[[], Awaitable[None]]) -> None:
    """Again and again, as it is turned away."""
    while True:
        try:
            await attack()
        except Exception as error:  # noqa: BLE001 - every failure has its own type
            print(type(error).__name__, error, flush=True)
        await asyncio.sleep(0.01)


def author_of(key: Path, invitation: str) -> Author:
    """Signs the attacker's records; with the certificate of its ``invitation``, if it has one."""
    if invitation == "-":
        identity.load_or_create(key)
        return Author(key)
    given = accept(Path(invitation), key, None)
    return Authority(Admission(given.owner, given.certificate), key)


async def main(name: str, key: str, invitation: str, addresses: list[str]) -> None:
    tally = Tally()
    if name == "half_open":
        print("attacks", flush=True)
        await asyncio.gather(*(for_ever(partial(half_open, int(port), tally)) for port in addresses))
    author = author_of(Path(key), invitation)
    known = [Multiaddr(it) for it in addresses]
    p2p = await P2P.create(initial_peers=known, identity_path=key, use_relay=name != "relay")
    targets = [PeerID.from_base58(owner_of(it)) for it in addresses]
    if name in REQUESTS:
        node = await DHTNode.create(p2p, initial_peers=addresses, client_mode=True, ensure_bootstrap_success=False)
        attacker = Attacker(author, p2p.peer_id, node, targets, Path(key).parent)
        print("attacks", flush=True)
        await ask_for_ever(attacker, name, node, targets, tally)
    if name == "relay":
        await p2p.add_binary_stream_handler(STOP, streams.read_circuits)
        caller = await P2P.create(initial_peers=known, use_relay=False)
        attacks = [partial(streams.relay, p2p, caller, target, tally) for target in targets]
    else:
        attacks = [partial(getattr(streams, name), p2p, target, tally) for target in targets]
    print("attacks", flush=True)
    await asyncio.gather(*map(for_ever, attacks))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], sys.argv[4:]))
