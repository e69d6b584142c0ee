"""A relay for peers that cannot be dialled: they hold a reservation here, and others reach them through it.

    peer behind NAT: Reserve     relay: Granted | Refusal     then Ping and its echo while the reservation is held
    caller: libp2p's circuit relay v2 (circuit_messages.py) to the relay; the relay calls the peer the same way

libp2p encrypts a circuit from end to end: the relay sees bytes. The p2p daemon's own relay is not used: it cuts a
circuit after 128 KiB, and its flags for more count only once libp2p has found out by itself that it is public. Only
admitted peers get a reservation, which ends with their invitation (admission/gate.py). The number of circuits and their
bytes a second are bounded, their duration is not: libp2p keeps a connection for as long as both its ends run, so one
makes room for another (:meth:`Relay._gives_way`). reservations.py is the side of the peer behind NAT.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hivemind.p2p import PeerID
from pydantic import Field

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.budgets import CIRCUIT_BYTES, CIRCUITS, RESERVATIONS, Spending
from peer.p2p.deadline import running
from peer.p2p.dial import parsed_id
from peer.p2p.reachability import circuit_messages
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Message, Refusal, Stream, StreamLost
from peer.rounds.backoff import Proven

log = get_logger("relay")

RELAY_PROTOCOL = "noloco/relay"
PING_SECONDS = 10.0  # between two pings of a holder
PING_PAUSE = 1.0  # seconds after a pong in which no other ping is read: a flood of them would hold the event loop
PONG_TIMEOUT = 15.0  # seconds: a slow line is full while a swap is on it
RESERVATION_SILENCE = 40.0  # seconds without a ping after which a reservation ends
CIRCUIT_IDLE = 120.0  # seconds without a byte; libp2p sends some every 30 s
CIRCUIT_STUCK = 60.0  # seconds in which nothing could be written
CIRCUIT_UNUSED = 30.0  # seconds after which one may have to make room for another
OF_ONE_PAIR = 4  # circuits at once: libp2p has one connection for all streams of two peers. Both may dial, some end
CIRCUIT_CHUNK = 64 * 1024  # bytes
SIGN_OF_LIFE = 128  # bytes at most that libp2p sends at a time when nobody uses a connection: 30, twice or four times


class Reserve(Message):
    """May others reach me through you?"""

    kind: Literal["reserve"] = "reserve"


class Granted(Message):
    """Yes, as long as this stream stays open and pings arrive."""

    kind: Literal["granted"] = "granted"


class Ping(Message):
    """From the holder, and back from the relay."""

    kind: Literal["ping"] = "ping"
    number: Annotated[int, Field(ge=0, lt=2**53)]


FULL = Refusal(reason="all its reservations are taken")
Raw = Callable[[str, str], Awaitable[Stream]]  # opens a stream without our own admission on it


@dataclass(eq=False)
class Circuit:
    """Two peers that the relay joins. ``ends``: the caller and the called; ``used``: when one of them has sent more
    than libp2p's signs of life.
    """

    ends: tuple[str, str]
    used: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """Belongs to the network thread. ``open_raw``: :meth:`peer.p2p.node.Node._open_raw`."""

    def __init__(self, open_raw: Raw, proven: Proven) -> None:
        self._open_raw, self._proven, self._forwarded = open_raw, proven, Spending(CIRCUIT_BYTES, proven)
        self._slots: dict[str, Stream] = {}  # by the holder's id
        self._circuits: list[Circuit] = []

    async def hold(self, stream: Stream) -> None:
        """Handler of :data:`RELAY_PROTOCOL`: a reservation lasts as long as this stream."""
        holder = stream.remote
        try:
            await stream.receive(Reserve, MESSAGE_TIMEOUT)
            if holder not in self._slots and not self._has_place(holder):
                await stream.send_last(FULL, MESSAGE_TIMEOUT)
                return
            self._slots[holder] = stream  # a later stream of the same peer replaces one that hangs
            await stream.send(Granted(), MESSAGE_TIMEOUT)
            log.debug("a reservation is held: %s", fields(peer=holder[-6:], slots=len(self._slots)))
            while True:
                ping = await stream.receive(Ping, RESERVATION_SILENCE)
                await stream.send(ping, MESSAGE_TIMEOUT)
                await asyncio.sleep(PING_PAUSE)
        finally:
            if self._slots.get(holder) is stream:
                del self._slots[holder]
                log.debug("a reservation has ended: %s", fields(peer=holder[-6:], slots=len(self._slots)))
            stream.close()

    def _has_place(self, holder: str) -> bool:
        """Those that are proven take no place from others, and others none from them."""
        return holder in self._proven or sum(it not in self._proven for it in self._slots) < RESERVATIONS

    async def hop(self, stream: Stream) -> None:
        """Handler of :data:`circuit_messages.HOP`: a caller asks for one of the holders."""
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT):
                kind, wanted = await circuit_messages.read_hop(stream.reader)
            target = PeerID(wanted).to_base58() if kind == circuit_messages.CONNECT else ""
            status = self._status(kind, stream.remote, target)
            if status == circuit_messages.OK:
                circuit = Circuit((stream.remote, target), clock.monotonic())
                self._circuits.append(circuit)
                try:
                    status = await self._connect(stream, target, circuit)
                finally:
                    self._circuits = [it for it in self._circuits if it is not circuit]
            if status != circuit_messages.OK:
                await stream.write(circuit_messages.hop_status(status), MESSAGE_TIMEOUT)
                await stream.until_closed(MESSAGE_TIMEOUT)
        except (asyncio.IncompleteReadError, BadMessage, StreamLost, OSError, ValueError) as error:
            log.debug("no circuit: %s", fields(caller=stream.remote[-6:], reason=str(error)))
        finally:
            stream.close()

    def _status(self, kind: int, caller: str, target: str) -> int:
        if kind != circuit_messages.CONNECT:
            return circuit_messages.RESERVATION_REFUSED  # libp2p's own reservations: ours are by :data:`RELAY_PROTOCOL`
        if target not in self._slots or target == caller:
            return circuit_messages.NO_RESERVATION
        return circuit_messages.OK if self._make_room(caller, target) else circuit_messages.LIMIT_EXCEEDED

    def _make_room(self, caller: str, target: str) -> bool:
        """For one more circuit between these two: can it be had?"""
        crowds = [(CIRCUITS.each, [it for it in self._circuits if end in it.ends]) for end in (caller, target)]
        pair = [it for it in self._circuits if {*it.ends} == {caller, target}]
        ending: list[Circuit] = []
        for limit, crowd in ((OF_ONE_PAIR, pair), *crowds, (CIRCUITS.all, self._circuits)):
            running = [it for it in crowd if it not in ending and not it.over.is_set()]
            if len(running) < limit:
                continue
            found = self._gives_way(running, limit, caller)
            if found is None:
                return False
            ending.append(found)
        for it in ending:
            it.over.set()
        return True

    def _gives_way(self, running: list[Circuit], limit: int, caller: str) -> Circuit | None:
        """Which one ends for another one of this caller, where the limit is reached; ``None``: none.

        The idlest that is unused. Where all are used, the idlest of who has most: of the callers that are not proven
        for one that is, and else only of one with at least two more. Once callers that are not proven have half of the
        places, they get none of the others.
        """
        new = [it for it in running if it.ends[0] not in self._proven]
        theirs = new if caller not in self._proven and len(new) >= limit // 2 else running
        idlest = min(theirs, key=lambda it: it.used, default=None)
        if idlest is None or clock.monotonic() - idlest.used >= CIRCUIT_UNUSED:
            return idlest
        calls = Counter(it.ends[0] for it in running)
        most = max(calls, key=lambda it: (it not in self._proven, calls[it]))
        if (most not in self._proven, calls[most]) <= (caller not in self._proven, calls[caller] + 1):
            return None
        return min((it for it in running if it.ends[0] == most), key=lambda it: it.used)

    async def _connect(self, caller: Stream, target: str, circuit: Circuit) -> int:
        """Call the target and forward bytes both ways until one side ends."""
        try:
            called = await self._open_raw(target, circuit_messages.STOP)
        except (StreamLost, TimeoutError):
            return circuit_messages.CONNECTION_FAILED
        with closing(called):
            caller_id = parsed_id(caller.remote).to_bytes()
            await called.write(circuit_messages.stop_connect(caller_id), MESSAGE_TIMEOUT)
            async with asyncio.timeout(MESSAGE_TIMEOUT):
                if await circuit_messages.read_stop_status(called.reader) != circuit_messages.OK:
                    return circuit_messages.CONNECTION_FAILED
            await caller.write(circuit_messages.hop_status(circuit_messages.OK), MESSAGE_TIMEOUT)
            pipes = self._pipe(circuit, caller, called), self._pipe(circuit, called, caller)
            async with running(*pipes, circuit.over.wait()) as tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return circuit_messages.OK

    async def _pipe(self, circuit: Circuit, source: Stream, sink: Stream) -> None:
        """Forward until one side ends or no byte moves for :data:`CIRCUIT_IDLE` seconds."""
        while True:
            async with asyncio.timeout(CIRCUIT_IDLE):
                data = await source.reader.read(CIRCUIT_CHUNK)
            if not data:
                return
            if len(data) > SIGN_OF_LIFE:
                circuit.used = source.heard = sink.heard = clock.monotonic()
            async with asyncio.timeout(CIRCUIT_STUCK):
                await self._forwarded.pace(source.remote, len(data))
            for piece in sink.bandwidth.up.pieces(data):  # as small as our own parts, which take turns with them
                await source.bandwidth.down.take(len(piece))
                await sink.bandwidth.up.take(len(piece))
                await sink.write(piece, CIRCUIT_STUCK)
