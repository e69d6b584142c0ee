"""Hosts behind a NAT, and connections through a relay as libp2p's daemons make them at their ends.

The relay itself is the product's (peer/p2p/reachability/relay.py). A connection through it carries its streams as
frames on the two streams that the relay joins; nothing replaces it by a direct one, as with symmetric NATs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from peer.p2p.addresses import CIRCUIT
from peer.p2p.dial import parsed_id
from peer.p2p.protobuf import delimited, read_delimited
from peer.p2p.reachability.circuit_messages import CAP, CIRCUIT_MESSAGES, CONNECT, HOP, OK, STOP, STOP_STATUS
from peer.p2p.stream import BadMessage
from tests.simulated.p2p.network import NOBODY, Connection, Host, Network, Pipe, SimulatedP2P

if TYPE_CHECKING:
    from tests.simulated.p2p.network import Writer

DIAL = 10.0  # seconds for a circuit
VANISH = 5.0  # seconds for an address from which nothing comes back
HEAD = 12  # bytes of a frame's head: the stream's number, the size
END = 2**32 - 1  # the size in the last frame of a stream
KEEP_ALIVE = 30.0  # seconds between two signs of life of libp2p's multiplexer, as long as both ends run
End = tuple[asyncio.StreamReader, "Writer"]  # of the stream between a host and the relay


class RelayedConnection(Connection):
    """Between ``one`` and ``other`` through ``relay``. ``ends``: by host id."""

    def __init__(self, network: Network, one: Host, other: Host, relay: Host, ends: dict[str, End]) -> None:
        super().__init__(network, one, other)
        self._relay, self._ends = relay, ends
        self._pipes: dict[tuple[int, str], Pipe] = {}  # by number and receiver
        for host in self.hosts:
            network.loop.create_task(self._read(host), context=NOBODY.copy())
        self._live()

    def stream(self, caller: Host, called: Host, protocol: str = "") -> tuple[Pipe, Pipe]:
        both = super().stream(caller, called, protocol)
        self._pipes |= {(pipe.number, pipe.receiver.peer_id): pipe for pipe in both}
        return both

    def origin(self, host: Host) -> str:
        return f"{self._relay.address}/p2p/{self._relay.peer_id}{CIRCUIT}"

    def passable(self, one: Host, other: Host) -> bool:
        return self.network.reachable(one, self._relay) and self.network.reachable(self._relay, other)

    def carry(self, pipe: Pipe, data: bytes | None) -> None:
        size = END if data is None else len(data)
        frame = pipe.number.to_bytes(8, "big") + size.to_bytes(4, "big") + (data or b"")
        self._ends[pipe.sender.peer_id][1].write(frame)

    def end(self, reason: str) -> None:
        super().end(reason)
        for _, writer in self._ends.values():
            writer.close()

    def _live(self) -> None:
        if self.open:
            for _, writer in self._ends.values():
                writer.write(bytes(HEAD))  # of no stream
            self.network.loop.call_later(KEEP_ALIVE, self._live, context=NOBODY)

    async def _read(self, host: Host) -> None:
        reader = self._ends[host.peer_id][0]
        try:
            while self.open:
                head = await reader.readexactly(HEAD)
                number, size = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
                data = None if size == END else await reader.readexactly(size)
                pipe = self._pipes.get((number, host.peer_id))
                if pipe is not None:
                    pipe.arrive(data)
                if data is None:
                    self._pipes.pop((number, host.peer_id), None)
        except (OSError, asyncio.IncompleteReadError):
            self.end("connection reset by peer")


class Circuits:
    """Makes them for the hosts of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        network.circuits = self
        # the called ends of new circuits, by the ids of caller, called and relay
        self._offered: dict[tuple[str, str, str], list[End]] = defaultdict(list)

    def accept(self, host: Host) -> None:
        """From now on this host's daemon answers relays that call it."""

        async def stop(info: Any, reader: asyncio.StreamReader, writer: Writer) -> None:
            try:
                async with asyncio.timeout(DIAL):
                    said = await read_delimited(CIRCUIT_MESSAGES["StopMessage"], reader, CAP)
            except (OSError, TimeoutError, BadMessage, asyncio.IncompleteReadError):
                writer.close()
                return
            caller = PeerID(said.peer.id).to_base58()
            offers = self._offered[caller, host.peer_id, info.peer_id.to_base58()]
            offers.append((reader, writer))
            self._network.loop.call_later(DIAL, self._give_up, offers, offers[-1], context=NOBODY)
            writer.write(delimited(CIRCUIT_MESSAGES["StopMessage"](type=STOP_STATUS, status=OK)))

        host.handlers[STOP] = stop

    def _give_up(self, offers: list[End], offer: End) -> None:
        """The caller has not come."""
        if offer in offers:
            offers.remove(offer)
            offer[1].close()

    async def dial(self, own: Host, other: Host) -> Connection:
        """Through all relays of ``other`` that ``own`` knows, at once. Raises ``OSError``."""
        dials = [asyncio.ensure_future(self._through(own, other, it)) for it in own.circuits.get(other.peer_id, ())]
        try:
            while dials:
                await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
                done = [dial for dial in dials if dial.done()]  # what asyncio returns, a set, has no order
                dials = [dial for dial in dials if dial not in done]
                for dial in done:
                    if dial.exception() is None:
                        return dial.result()
        finally:
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
        await asyncio.sleep(VANISH)
        raise OSError("i/o timeout")

    async def _through(self, own: Host, other: Host, relay_id: str) -> Connection:
        own.book.add(relay_id)
        called = parsed_id(other.peer_id).to_bytes()
        async with asyncio.timeout(DIAL):
            p2p = SimulatedP2P(self._network, own)
            _, reader, writer = await p2p.call_binary_stream_handler(parsed_id(relay_id), HOP)
            try:
                writer.write(delimited(CIRCUIT_MESSAGES["HopMessage"](type=CONNECT, peer={"id": called})))
                said = await read_delimited(CIRCUIT_MESSAGES["HopMessage"], reader, CAP)
                if said.status != OK:
                    raise OSError(f"error opening relay circuit: {said.status}")
                offers = self._offered[own.peer_id, other.peer_id, relay_id]
                far = next(it for it in reversed(offers) if not it[0].at_eof())
                offers.remove(far)
                if other.peer_id in own.links:  # another dial was faster
                    far[1].close()
                    writer.close()
                    return own.links[other.peer_id]
            except (BadMessage, StopIteration, asyncio.IncompleteReadError) as error:
                writer.close()
                raise OSError(f"no circuit: {error}") from None
            except BaseException:
                writer.close()
                raise
            ends = {own.peer_id: (reader, writer), other.peer_id: far}
            return RelayedConnection(self._network, own, other, self._network.hosts[relay_id], ends)
