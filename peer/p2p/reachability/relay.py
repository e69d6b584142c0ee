"""A relay for peers that cannot be dialled: they hold a reservation here, and others reach them through it.

    peer behind NAT: Reserve     relay: Granted | Full     then Ping and its echo while the reservation is held
    caller: libp2p's circuit relay v2 (circuit_messages.py) to the relay; the relay calls the peer the same way

libp2p encrypts a circuit from end to end: the relay sees bytes. The p2p daemon's own relay is not used: it cuts a
circuit after 128 KiB, and its flags for more count only once libp2p has found out by itself that it is public. Only
admitted peers get a reservation. The number of circuits and their bytes a second are bounded, their duration is not.
reservations.py is the side of the peer behind NAT.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from hivemind.p2p import PeerID
from pydantic import Field, TypeAdapter

from peer.logs import fields, get_logger
from peer.p2p.budgets import CIRCUIT_BYTES, CIRCUITS, RESERVATIONS, Proven, Spending
from peer.p2p.reachability import circuit_messages
from peer.p2p.stream import BadMessage, Message, Stream, StreamLost

log = get_logger("relay")

RELAY_PROTOCOL = "noloco/relay/1"
RESERVE_TIMEOUT = 5.0  # seconds for one message
PING_SECONDS = 10.0  # between two pings of a holder
PONG_TIMEOUT = 15.0  # seconds: a slow line is full while a swap is on it
RESERVATION_SILENCE = 40.0  # seconds without a ping after which a reservation ends
CIRCUIT_IDLE = 120.0  # seconds without a byte; libp2p sends some every 30 s
CIRCUIT_STUCK = 60.0  # seconds in which nothing could be written
CIRCUIT_CHUNK = 64 * 1024  # bytes


class Reserve(Message):
    """May others reach me through you?"""

    kind: Literal["reserve"] = "reserve"


class Granted(Message):
    """Yes, as long as this stream stays open and pings arrive."""

    kind: Literal["granted"] = "granted"


class Full(Message):
    """All reservations are taken."""

    kind: Literal["full"] = "full"


class Ping(Message):
    """From the holder, and back from the relay."""

    kind: Literal["ping"] = "ping"
    number: Annotated[int, Field(ge=0, lt=2**53)]


REPLY: TypeAdapter[Granted | Full] = TypeAdapter(Annotated[Granted | Full, Field(discriminator="kind")])
Raw = Callable[[str, str], Awaitable[Stream]]  # opens a stream without our own admission on it


class Relay:
    """Belongs to the network thread. ``open_raw``: :meth:`peer.p2p.node.Node.open_raw`."""

    def __init__(self, open_raw: Raw, proven: Proven) -> None:
        self._open_raw, self._forwarded = open_raw, Spending(CIRCUIT_BYTES, proven)
        self._slots: dict[str, Stream] = {}  # by the holder's id
        self._circuits: Counter[str] = Counter()  # by id; each circuit counts at its two ends

    async def hold(self, stream: Stream) -> None:
        """Handler of :data:`RELAY_PROTOCOL`: a reservation lasts as long as this stream."""
        holder = stream.remote
        try:
            await stream.receive(Reserve, RESERVE_TIMEOUT)
            if holder not in self._slots and len(self._slots) >= RESERVATIONS.all:
                await stream.send_last(Full(), RESERVE_TIMEOUT)
                return
            self._slots[holder] = stream  # a later stream of the same peer replaces one that hangs
            await stream.send(Granted(), RESERVE_TIMEOUT)
            log.debug("a reservation is held: %s", fields(peer=holder[-6:], slots=len(self._slots)))
            while True:
                ping = await stream.receive(Ping, RESERVATION_SILENCE)
                await stream.send(ping, RESERVE_TIMEOUT)
        finally:
            if self._slots.get(holder) is stream:
                del self._slots[holder]
                log.debug("a reservation has ended: %s", fields(peer=holder[-6:], slots=len(self._slots)))
            stream.close()

    async def hop(self, stream: Stream) -> None:
        """Handler of :data:`circuit_messages.HOP`: a caller asks for one of the holders."""
        try:
            async with asyncio.timeout(RESERVE_TIMEOUT):
                kind, wanted = await circuit_messages.read_hop(stream.reader)
            target = PeerID(wanted).to_base58() if kind == circuit_messages.CONNECT else ""
            status = self._status(kind, stream.remote, target)
            if status == circuit_messages.OK:
                ends = (stream.remote, target)
                self._circuits.update(ends)
                try:
                    status = await self._connect(stream, target)
                finally:
                    self._circuits -= Counter(ends)
            if status != circuit_messages.OK:
                await stream.write(circuit_messages.hop_status(status), RESERVE_TIMEOUT)
                await stream.until_closed(RESERVE_TIMEOUT)
        except (asyncio.IncompleteReadError, BadMessage, StreamLost, OSError, ValueError) as error:
            log.debug("no circuit: %s", fields(caller=stream.remote[-6:], reason=str(error)))
        finally:
            stream.close()

    def _status(self, kind: int, caller: str, target: str) -> int:
        if kind != circuit_messages.CONNECT:
            return circuit_messages.RESERVATION_REFUSED  # libp2p's own reservations: ours are by :data:`RELAY_PROTOCOL`
        if target not in self._slots or target == caller:
            return circuit_messages.NO_RESERVATION
        busiest = max(self._circuits[caller], self._circuits[target])
        if self._circuits.total() >= 2 * CIRCUITS.all or busiest >= CIRCUITS.each:
            return circuit_messages.LIMIT_EXCEEDED
        return circuit_messages.OK

    async def _connect(self, caller: Stream, target: str) -> int:
        """Call the target and forward bytes both ways until one side ends."""
        try:
            called = await self._open_raw(target, circuit_messages.STOP)
        except (StreamLost, TimeoutError):
            return circuit_messages.CONNECTION_FAILED
        try:
            caller_id = PeerID.from_base58(caller.remote).to_bytes()
            await called.write(circuit_messages.stop_connect(caller_id), RESERVE_TIMEOUT)
            async with asyncio.timeout(RESERVE_TIMEOUT):
                if await circuit_messages.read_stop_status(called.reader) != circuit_messages.OK:
                    return circuit_messages.CONNECTION_FAILED
            await caller.write(circuit_messages.hop_status(circuit_messages.OK), RESERVE_TIMEOUT)
            await self._carry(caller, called)
        finally:
            called.close()
        return circuit_messages.OK

    async def _carry(self, *ends: Stream) -> None:
        tasks = [asyncio.ensure_future(self._pipe(*both)) for both in (ends, ends[::-1])]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pipe(self, source: Stream, sink: Stream) -> None:
        """Forward until one side ends or no byte moves for :data:`CIRCUIT_IDLE` seconds."""
        while True:
            async with asyncio.timeout(CIRCUIT_IDLE):
                data = await source.reader.read(CIRCUIT_CHUNK)
            if not data:
                return
            async with asyncio.timeout(CIRCUIT_STUCK):
                await self._forwarded.pace(source.remote, len(data))
            await source.bandwidth.down.take(len(data))
            await sink.bandwidth.up.take(len(data))
            await sink.write(data, CIRCUIT_STUCK)
