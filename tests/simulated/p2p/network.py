"""An in-memory network with the interface of hivemind's ``P2P``: hosts, connections, streams with back pressure.

Modelled after what was measured of the p2p daemon: no half-close (a stream that one side closes is over for both, and
bytes under way may be lost without an error), no time-outs of its own, dials that fail when two hosts dial each other
at once, connections that stay silent while a line is cut and go on some time after.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.p2p.addresses import relay_of
from peer.p2p.dial import parsed_id
from peer.p2p.reachability import circuit_messages
from tests.simulated.loop import PROCESS, Process, VirtualLoop

CHUNK = 64 * 1024  # bytes of one event on a line
WINDOW = 256 * 1024  # bytes of a stream that may be under way or unread, as yamux has it at first
DIAL_BACKOFF = 5.0  # seconds after a failed dial, as libp2p has it
LOST_TAIL = 0.002  # probability that a close cuts off the bytes under way
DEAD_CONNECTION = 60.0  # seconds of a cut after which a connection may be dead
CALL = 1100  # bytes of a request or a new stream besides what they carry, as measured between real nodes
CIRCUITS = (circuit_messages.HOP, circuit_messages.STOP)  # protocols between a relay and those that it joins
BULK = 64  # bytes: more, and no message, is a part of a tensor
NOBODY = contextvars.Context()
LoopHandler = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(eq=False)
class Host:
    """A machine with one peer. ``up``, ``down``: bytes a second; ``latency``: seconds to the middle of the network.

    ``chunk``, ``window``: as the constants. ``damage``, ``snap``: probability that a part which it sends is damaged, or
    that the connection breaks that carries it. ``nat``: others cannot dial it, but through relays (circuit.py).
    ``queue``: what is on its line, as long as that is slower than usual.
    """

    peer_id: str
    address: str
    latency: float
    up: float
    down: float
    process: Process | None = None
    handlers: dict[str, LoopHandler] = field(default_factory=dict)
    links: dict[str, Connection] = field(default_factory=dict)  # by the other host's id
    book: set[str] = field(default_factory=set)  # ids whose addresses it knows
    backoff: dict[str, float] = field(default_factory=dict)  # id: when it may dial again
    dialling: set[str] = field(default_factory=set)
    sent_until: float = 0.0
    received_until: float = 0.0
    bytes_sent: int = 0
    chunk: int = CHUNK
    window: int = WINDOW
    damage: float = 0.0
    snap: float = 0.0
    nat: bool = False
    queue: list[tuple[Any, Pipe, bytes | None]] | None = None
    circuits: dict[str, list[str]] = field(default_factory=dict)  # ids of relays by those of hosts behind a NAT

    @property
    def alive(self) -> bool:
        return self.process is not None and not self.process.dead


def new_id(chance: random.Random) -> str:
    """A valid libp2p id."""
    return PeerID(b"\x12\x20" + hashlib.sha256(chance.randbytes(16)).digest()).to_base58()


@lru_cache(4096)
def _text(address: bytes) -> str:
    """hivemind reads a multiaddr in Python."""
    return str(Multiaddr(address))


def _is_part(data: bytes) -> bool:
    """Of a tensor, and no message."""
    return len(data) > BULK and data[4:5] != b"{"


class Network:
    """All hosts. ``cuts``: pairs of hosts without a way between them."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.loop, self.chance = loop, chance
        self.hosts: dict[str, Host] = {}
        self._cuts: dict[frozenset[str], int] = {}
        self.circuits: Any = None  # circuit.py's
        self.lost_tails = self.streams = self.damaged = self.snapped = 0
        self.sent: Counter[str] = Counter()  # bytes by protocol; "parts" of tensors

    def add(self, latency: float, up: float, down: float, *, nat: bool = False) -> Host:
        number = len(self.hosts) + 1
        host = Host(
            new_id(self.chance), f"/ip4/45.0.{number // 250}.{number % 250 + 1}/tcp/4000", latency, up, down, nat=nat
        )
        self.hosts[host.peer_id] = host
        return host

    # -- faults

    def cut(self, one: Iterable[Host], other: Iterable[Host]) -> Callable[[], None]:
        """No packet passes between the two groups; returns what ends it."""
        pairs = [frozenset((a.peer_id, b.peer_id)) for a in one for b in other if a is not b]
        began = self.loop.time()
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1

        def heal() -> None:
            for pair in pairs:
                self._cuts[pair] -= 1
                if not self._cuts[pair]:
                    del self._cuts[pair]
                    self._go_on(pair, self.loop.time() - began)

        return heal

    def slow(self, host: Host, speed: float, chunk: int) -> Callable[[], None]:
        """Its line carries so many bytes a second, ``chunk`` at a time; returns what ends it."""
        factor = host.up / speed
        host.up, host.chunk = host.up / factor, chunk
        host.queue = host.queue or []

        def heal() -> None:
            queue, host.queue = host.queue or [], None
            host.up, host.chunk, host.sent_until = host.up * factor, CHUNK, self.loop.time()
            queue = [(call, pipe, data) for call, pipe, data in queue if call.when() > self.loop.time()]
            for call, pipe, _ in queue:
                call.cancel()
                pipe.last = 0.0
            for _, pipe, data in queue:
                pipe.link.carry(pipe, data)

        return heal

    def reachable(self, one: Host, other: Host) -> bool:
        return frozenset((one.peer_id, other.peer_id)) not in self._cuts

    async def way(self, one: Host, other: Host, link: Connection | None = None) -> None:
        """Until packets pass between the two, on ``link``: as long as a cut lasts."""
        passable = self.reachable if link is None else link.passable
        while not passable(one, other):  # noqa: ASYNC110 - a cut has no event
            await asyncio.sleep(1.0)

    def drop(self, one: Host, other: Host) -> None:
        """The connection of two hosts breaks."""
        link = one.links.get(other.peer_id)
        if link is not None:
            link.end("connection reset by peer")

    def drop_all(self, host: Host) -> None:
        """The host's daemon ends: whoever can hear it learns so."""
        for known in (host.handlers, host.dialling, host.backoff):
            known.clear()
        for link in list(host.links.values()):
            link.end("connection reset by peer")

    def worn(self, pipe: Pipe, data: bytes) -> bytes:
        """``data`` as it leaves the sender: a part of a tensor may be damaged, or its connection breaks soon.

        The link is encrypted: what is damaged is a buffer before it, half-filled or with a wrong byte.
        """
        sender = pipe.sender
        if not _is_part(data):
            return data
        if sender.snap and self.chance.random() < sender.snap:
            self.snapped += 1
            self.loop.call_later(self.chance.uniform(0, 0.1), pipe.link.end, "connection reset by peer")
        if sender.damage and self.chance.random() < sender.damage:
            self.damaged += 1
            at = self.chance.randrange(len(data))
            if self.chance.random() < 0.5:
                return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            return data[:at] + bytes(len(data) - at)
        return data

    def _go_on(self, pair: frozenset[str], cut: float) -> None:
        one, other = (self.hosts[it] for it in sorted(pair))
        link = one.links.get(other.peer_id)
        if link is None:
            return
        if cut > DEAD_CONNECTION and self.chance.random() < 0.5:
            link.end("connection timed out")
        else:  # TCP sends again after a pause that has doubled during the cut
            self.loop.call_later(self.chance.uniform(0.2, 0.2 + cut), link.go_on)

    # -- the way of bytes

    def delay(self, one: Host, other: Host) -> float:
        return (one.latency + other.latency) * self.chance.uniform(1.0, 1.2)

    def arrival(self, sender: Host, receiver: Host, size: int) -> float:
        """When ``size`` bytes that leave now have arrived, behind all that both lines carry already.

        The receiver's line carries them from now on: what is still on its way from a slow sender holds up no other.
        """
        now, down = self.loop.time(), size / receiver.down
        sender.sent_until = max(now, sender.sent_until) + size / sender.up
        sender.bytes_sent += size
        receiver.received_until = max(now, receiver.received_until) + down
        return max(sender.sent_until + self.delay(sender, receiver) + down, receiver.received_until)

    async def connect(self, own: Host, peer_id: str) -> Connection:
        """A connection, new or not. Raises ``OSError`` with p2pd's words; waits for ever where packets vanish."""
        link = own.links.get(peer_id)
        if link is not None:
            return link
        other = self.hosts.get(peer_id)
        if other is None or peer_id not in own.book:
            raise OSError("failed to find any peer in table")
        if own.backoff.get(peer_id, 0.0) > self.loop.time():
            raise OSError("dial backoff")
        if other.nat:
            return await self._through_relays(own, other)
        own.dialling.add(peer_id)
        try:
            trip = 2 * self.delay(own, other)
            await asyncio.sleep(trip)
            await self.way(own, other)
            await asyncio.sleep(trip)
            if not other.alive:
                raise OSError("connection refused")
            if own.peer_id in other.dialling and self.chance.random() < 0.5:
                other.backoff[own.peer_id] = self.loop.time() + DIAL_BACKOFF
                raise OSError("simultaneous connect")
        except OSError:
            own.backoff[peer_id] = self.loop.time() + DIAL_BACKOFF
            raise
        finally:
            own.dialling.discard(peer_id)
        return own.links.get(peer_id) or Connection(self, own, other)

    async def _through_relays(self, own: Host, other: Host) -> Connection:
        try:
            return await self.circuits.dial(own, other)
        except OSError:
            own.backoff[other.peer_id] = self.loop.time() + DIAL_BACKOFF
            raise


class Connection:
    """Of two hosts; it carries all their streams."""

    def __init__(self, network: Network, one: Host, other: Host) -> None:
        self.network, self.hosts, self.open = network, (one, other), True
        self.streams: dict[Pipe, None] = {}
        one.links[other.peer_id] = other.links[one.peer_id] = self
        one.book.add(other.peer_id)
        other.book.add(one.peer_id)

    def stream(self, caller: Host, called: Host, protocol: str = "") -> tuple[Pipe, Pipe]:
        """The two directions of a new stream."""
        there, back = Pipe(self, caller, called), Pipe(self, called, caller)
        there.partner, back.partner = back, there
        self.network.streams += 1
        self.network.sent[protocol] += CALL
        there.number = back.number = self.network.streams
        there.protocol = back.protocol = protocol
        return there, back

    def origin(self, host: Host) -> str:
        """What its other end sees as this one's address."""
        return host.address

    def passable(self, one: Host, other: Host) -> bool:
        """Do packets pass?"""
        return self.network.reachable(one, other)

    def carry(self, pipe: Pipe, data: bytes | None) -> None:
        """Put ``data``, or the end of the stream, on the line."""
        at = max(self.network.arrival(pipe.sender, pipe.receiver, len(data or b"")), pipe.last)
        pipe.last = at
        call = pipe.later(at, pipe.arrive, data)
        if pipe.sender.queue is not None:
            pipe.sender.queue.append((call, pipe, data))

    def end(self, reason: str) -> None:
        """Both sides lose all streams, each when the news can reach it."""
        if not self.open:
            return
        self.open = False
        one, other = self.hosts
        one.links.pop(other.peer_id, None)
        other.links.pop(one.peer_id, None)
        for pipe in list(self.streams):
            pipe.break_off(reason)

    def go_on(self) -> None:
        """The cut is over, and TCP has noticed it."""
        for pipe in list(self.streams):
            pipe.flush()


class Pipe:
    """One direction of a stream."""

    def __init__(self, link: Connection, sender: Host, receiver: Host) -> None:
        self.network, self.link, self.sender, self.receiver = link.network, link, sender, receiver
        self.reader = asyncio.StreamReader(limit=WINDOW, loop=link.network.loop)
        self.reader.set_transport(_Throttle(self))  # type: ignore[arg-type]
        self.partner: Pipe = self
        self.number, self.protocol = 0, ""  # of the stream
        self.closed = self.ended = False
        self.reason = ""
        self.unread = self.last = 0.0
        self._stalled: list[tuple[bytes | None, float]] = []  # came to the end of a cut line
        self._room: asyncio.Future[None] | None = None
        self._under_way = 0
        self.paused = False
        link.streams[self] = None

    # -- the sender's side

    def send(self, data: bytes) -> None:
        if self.closed or not self.sender.alive:
            return
        size, circuit = self.sender.chunk, self.protocol in CIRCUITS  # encrypted between its ends
        data = data if circuit else self.network.worn(self, data)
        self.network.sent["parts" if _is_part(data) and not circuit else self.protocol] += len(data)
        for start in range(0, len(data), size):
            self._put(bytes(data[start : start + size]))

    async def drain(self) -> None:
        while not self.closed and self._under_way > self.sender.window:
            self._room = self._room or self.network.loop.create_future()
            await asyncio.shield(self._room)
        if self.reason:
            raise ConnectionResetError(self.reason)

    def close(self) -> None:
        """By the sender, for both directions: the other side reads what is under way, and then an end."""
        if self._under_way and self.network.chance.random() < LOST_TAIL:
            self.network.lost_tails += 1
            self.later(self.network.loop.time() + self.network.delay(self.sender, self.receiver), self._end, "")
        self._put(None)
        for pipe in (self, self.partner):
            pipe.closed = True
            pipe._wake()
        self.later(self.network.loop.time(), self.partner._end, "")  # this side reads nothing more

    def break_off(self, reason: str) -> None:
        self.closed, self.reason = True, reason
        self._wake()
        self.later(self.network.loop.time() + self.network.delay(self.sender, self.receiver), self._end, reason)

    # -- the line

    def later(self, at: float, work: Callable[[Any], None], argument: Any) -> Any:
        """The line is nobody's process: it works on when one is frozen or dead."""
        return self.network.loop.call_at(at, work, argument, context=NOBODY)

    def _put(self, data: bytes | None) -> None:
        self._under_way += len(data or b"")
        self.link.carry(self, data)

    def arrive(self, data: bytes | None) -> None:
        """It is at the receiver's end of the line."""
        if self._stalled or self.paused or not self.link.passable(self.sender, self.receiver):
            self._stalled.append((data, 0.0))
        else:
            self._deliver(data)

    def _deliver(self, data: bytes | None) -> None:
        if self.ended:
            return
        if data is None:
            self._end("")
            return
        self._under_way -= len(data)
        self._wake()
        if self.receiver.alive:
            self.reader.feed_data(data)

    def flush(self) -> None:
        """Deliver what has waited, as long as the line is open and the reader takes it."""
        while self._stalled and not self.paused and self.link.passable(self.sender, self.receiver):
            self._deliver(self._stalled.pop(0)[0])

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self.link.streams.pop(self, None)
        if reason and self.network.chance.random() < 0.5:
            self.reader.set_exception(ConnectionResetError(reason))
        else:
            self.reader.feed_eof()  # a lost stream looks like an ended one

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None


class _Throttle:
    """What a StreamReader asks of its transport when its buffer is full."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def pause_reading(self) -> None:
        self._pipe.paused = True

    def resume_reading(self) -> None:
        self._pipe.paused = False
        self._pipe.flush()

    def is_closing(self) -> bool:
        return self._pipe.closed


class Writer:
    """The methods of an ``asyncio.StreamWriter`` that are used. ``pipe``: identifies the stream for the ledger."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def write(self, data: bytes | memoryview) -> None:
        self.pipe.send(bytes(data))

    async def drain(self) -> None:
        await self.pipe.drain()

    def close(self) -> None:
        if self.pipe.sender.alive and not self.pipe.closed:
            self.pipe.close()

    def is_closing(self) -> bool:
        return self.pipe.closed


@dataclass(frozen=True)
class StreamInfo:
    """What hivemind tells a handler of an incoming stream. ``addr``: of a multiaddr only its text is used."""

    peer_id: PeerID
    addr: str


class SimulatedP2P:
    """hivemind's ``P2P`` of one host, as far as the product uses it."""

    ended = False

    def __init__(self, network: Network, host: Host) -> None:
        self.network, self.host = network, host
        self.peer_id = parsed_id(host.peer_id)
        self._client = self

    async def call_binary_stream_handler(self, peer_id: PeerID, protocol: str) -> tuple[StreamInfo, Any, Any]:
        other = peer_id.to_base58()
        link = await self.network.connect(self.host, other)
        called = self.network.hosts[other]
        there, back = link.stream(self.host, called, protocol)
        try:
            await self._arrives(link, called, protocol, there, back)
        except (OSError, asyncio.CancelledError):  # its daemon resets what the caller has given up
            there.break_off("stream reset")
            back.break_off("stream reset")
            raise
        return StreamInfo(peer_id, link.origin(called)), back.reader, Writer(there)

    async def _arrives(self, link: Connection, called: Host, protocol: str, there: Pipe, back: Pipe) -> None:
        await asyncio.sleep(self.network.delay(self.host, called))
        await self.network.way(self.host, called, link)
        handler = called.handlers.get(protocol)
        if not link.open or handler is None or not called.alive:
            raise OSError("protocol not supported" if link.open else "stream reset")
        info = StreamInfo(self.peer_id, link.origin(self.host))
        self._serve(called, handler(info, there.reader, Writer(back)))  # type: ignore[arg-type]
        await asyncio.sleep(self.network.delay(called, self.host))

    def _serve(self, host: Host, work: Awaitable[None]) -> None:
        token = PROCESS.set(host.process)
        try:
            self.network.loop.create_task(work)  # type: ignore[arg-type]
        finally:
            PROCESS.reset(token)

    async def add_binary_stream_handler(self, protocol: str, handler: LoopHandler) -> None:
        self.host.handlers[protocol] = handler

    async def connect(self, peer_id: PeerID, addresses: list[Multiaddr]) -> None:
        self.host.book.add(peer_id.to_base58())
        relays = [relay for relay in (relay_of(_text(it.to_bytes())) for it in addresses) if relay]
        if relays:
            self.host.circuits[peer_id.to_base58()] = relays
        await self.network.connect(self.host, peer_id.to_base58())

    async def disconnect(self, peer_id: PeerID) -> None:
        link = self.host.links.get(peer_id.to_base58())
        if link is not None:
            link.end("connection closed")

    async def list_peers(self) -> list[str]:
        return list(self.host.links)

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        return [Multiaddr(f"{self.host.address}/p2p/{self.host.peer_id}")]

    async def shutdown(self) -> None:
        with contextlib.suppress(KeyError):
            self.network.drop_all(self.host)
