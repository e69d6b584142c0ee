"""Where is a peer? The answers to libp2p's Kademlia, in place of the p2p daemon's own.

hivemind's DHT knows other nodes by id; the daemons find their addresses by Kademlia's FIND_NODE. The daemon's own
server keeps what anybody tells it (ADD_PROVIDER) and tells everybody who is there. So all daemons are clients, and a
node that can be dialled answers here: FIND_NODE from the peers that it is connected to, and nothing else. In an invited
swarm it names others only to who is invited.

https://github.com/libp2p/specs/blob/master/kad-dht/README.md
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from peer import clock
from peer.p2p.addresses import LONGEST
from peer.p2p.budgets import DHT_BYTES, DHT_REQUESTS, Spending
from peer.p2p.protobuf import BYTES_FIELD, INT_FIELD, MANY, ONE, delimited, message_classes, read_delimited
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.backoff import Proven

KADEMLIA = "/ipfs/kad/1.0.0"
FIND_NODE, PING = 4, 5  # kinds of a message
CONNECTED = 1
CLOSEST = 20  # peers in an answer
ADDRESSES = 8  # of one peer, none longer than in a record: a peer may tell the daemon any
REQUEST_BYTES = 1024
IDLE = 60.0  # seconds without a request
ANSWER_TIMEOUT = 5.0  # seconds to look up and send one
FIND_SECONDS = 1  # for the daemon to look a connected peer up, which it has in memory; a whole number on its wire
LIST_SHARE = 0.05  # of the time goes into lists of the connected peers: of hundreds, one takes many milliseconds
KNOWN_SECONDS, UNKNOWN_SECONDS = 30.0, 1.0  # for which the addresses of a peer are used; that it has told none

KADEMLIA_MESSAGES = message_classes(
    "kademlia",
    {
        "Peer": [("id", 1, BYTES_FIELD, ONE), ("addrs", 2, BYTES_FIELD, MANY), ("connection", 3, INT_FIELD, ONE)],
        "Message": [("type", 1, INT_FIELD, ONE), ("key", 2, BYTES_FIELD, ONE), ("closerPeers", 8, "Peer", MANY)],
    },
)


class Whereabouts:
    """Answers for one node. ``p2p``: hivemind's client of its daemon; ``welcome``: may an id learn who is there?"""

    def __init__(self, p2p: Any, welcome: Callable[[str], bool], proven: Proven) -> None:
        self._p2p, self._welcome = p2p, welcome
        self._asked, self._bytes = Spending(DHT_REQUESTS, proven), Spending(DHT_BYTES, proven)
        self._connected: list[PeerID] = []
        self._listing, self._next_list = asyncio.Lock(), 0.0
        self._addresses: dict[PeerID, tuple[list[bytes], float]] = {}  # and until when they are used

    async def answer(self, stream: Stream) -> None:
        """Handler of :data:`KADEMLIA`: one answer to each request on a stream."""
        with closing(stream), suppress(asyncio.IncompleteReadError, BadMessage, StreamLost, OSError, TimeoutError):
            while True:
                async with asyncio.timeout(IDLE):
                    asked = await read_delimited(KADEMLIA_MESSAGES["Message"], stream.reader, REQUEST_BYTES)
                if asked.type not in (FIND_NODE, PING) or not self._asked.spend(stream.remote):
                    return
                said = KADEMLIA_MESSAGES["Message"](type=asked.type, key=asked.key)
                if asked.type == FIND_NODE:
                    async with asyncio.timeout(ANSWER_TIMEOUT):
                        said.closerPeers.extend(await self._closest(asked.key, stream.remote))
                if not self._bytes.spend(stream.remote, asked.ByteSize() + said.ByteSize()):
                    return
                await stream.write(delimited(said), ANSWER_TIMEOUT)

    async def _closest(self, key: bytes, remote: str) -> list[Any]:
        """The peers nearest to ``key``. A server that names nobody is none to libp2p: who may not ask hears of us."""
        own = _peer(self._p2p.peer_id, [it.to_bytes() for it in await self._p2p.get_visible_maddrs()])
        if not self._welcome(remote):
            return [own]
        await self._look()
        target = hashlib.sha256(key).digest()
        others = [it for it in self._connected if it.to_base58() != remote]
        nearest = sorted(others, key=lambda it: _distance(target, it.to_bytes()))[:CLOSEST]
        found = [_peer(it, await self._addresses_of(it)) for it in nearest]
        return [it for it in found if it.addrs] or [own]

    async def _look(self) -> None:
        """List the connected peers, as late as this costs little: two that have just come look for each other."""
        async with self._listing:
            began = clock.monotonic()
            if began < self._next_list:
                return
            self._connected = [it.peer_id for it in await self._p2p.list_peers()]
            ended = clock.monotonic()
            self._next_list = ended + (ended - began) / LIST_SHARE
            self._addresses = {it: held for it, held in self._addresses.items() if held[1] > ended}

    async def _addresses_of(self, peer_id: PeerID) -> list[bytes]:
        """As the peer itself has told the daemon."""
        addresses, until = self._addresses.get(peer_id, ([], 0.0))
        if clock.monotonic() >= until:
            told = await known_addresses(self._p2p, peer_id)
            addresses = [it for it in told if len(it) <= LONGEST][:ADDRESSES]
            until = clock.monotonic() + (KNOWN_SECONDS if addresses else UNKNOWN_SECONDS)
            self._addresses[peer_id] = addresses, until
        return addresses


async def known_addresses(p2p: Any, peer_id: PeerID) -> list[bytes]:
    """Multiaddrs (bytes) of a connected peer; none when the daemon knows none. The caller sets the deadline."""
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    with closing(writer):
        find = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=peer_id.to_bytes(), timeout=FIND_SECONDS)
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=find))
        answer = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, answer)
    return list(answer.dht.peer.addrs)


def _peer(peer_id: PeerID, addresses: list[bytes]) -> Any:
    return KADEMLIA_MESSAGES["Peer"](id=peer_id.to_bytes(), addrs=addresses, connection=CONNECTED)


def _distance(target: bytes, peer_id: bytes) -> int:
    return int.from_bytes(target, "big") ^ int.from_bytes(hashlib.sha256(peer_id).digest(), "big")
