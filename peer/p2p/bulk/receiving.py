"""The receiver's side of a transfer: each connection asks for parts by their numbers, from one counter.

Each one asks for as much as it gets in a set time, so that a fast one never runs dry and the last parts do not wait for
a slow one. What a lost one has asked for and not got, another one asks for (payload_parts.py). Parts are given out in
their order, so a guard sees the first eighth first.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

import xxhash

from peer import clock
from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.handover import Handover
from peer.p2p.bulk.payload_parts import AskedPart, PayloadParts
from peer.p2p.payload import DIGEST_BYTES, CorruptPart

PART_REQUEST = struct.Struct("!II")  # a part's number, and the first one that is missing: older ones are not needed
NO_MORE = 2**32 - 1  # instead of a number: all parts have come
ASKED_SECONDS = 1.0  # at its rate, of parts that a connection has asked for and not got: more than a round trip
LEAST_ASKED_PARTS = 2  # the same in parts: one is on its way while another one is asked for
SHORTEST_FETCH = 1e-6  # seconds between two parts: a clock may be coarse


class IncomingParts(Handover):
    """What comes: parts that a connection has asked for, into the receiver's rooms in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, payloads: int = 1) -> None:
        super().__init__(loop, payloads)
        self._payload = PayloadParts(())  # the one that comes, or the last one; before the first one, one of no parts
        self._free: list[bytearray] = []  # for further parts

    async def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]:
        """As :func:`peer.p2p.payload.receive_parts`, for the next payload."""
        with self.changed:
            number = first = self._payload.claimed
            self._payload = payload = PayloadParts(rooms, first)
            self._payloads -= 1
            self.stall = stall
        while True:
            with self.changed:
                payload.wanted = number
                self.changed.notify_all()
            await self.until(partial(payload.arrived_or_absent, number))
            if number == payload.end:
                return
            with self.changed:
                room, data, digest = payload.give_out(number)
                self._free.append(data)
                room[:] = data
            yield number - first, room, digest
            number += 1

    def forget(self) -> None:
        """It has ended: the memory of its parts is free, whoever still holds the transfer."""
        with self.changed:
            self._free.clear()
            self._payload = PayloadParts(())

    def pull(self, connection: BulkConnection) -> None:
        """In the connection's thread, until all parts have come. Raises ``OSError``, or the error of the transfer."""
        asked: deque[AskedPart] = deque()
        rate, began = 0.0, 0.0  # bytes a second; since when they have come
        try:
            while True:
                while (claimed := self._claim(asked, ASKED_SECONDS * rate)) is not None:
                    if not asked:
                        began = clock.monotonic()
                    asked.append(claimed)
                    connection.write(PART_REQUEST.pack(claimed.number, claimed.first_missing), self.stall)
                if not asked:
                    connection.write(PART_REQUEST.pack(NO_MORE, 0), self.stall)
                    return
                self._fetch(connection, asked[0])
                size, now = asked.popleft().size, clock.monotonic()
                rate, began = (rate + size / max(now - began, SHORTEST_FETCH)) / 2, now
        except CorruptPart as error:
            self.fail(error)
            raise
        finally:
            with self.changed:
                for part in asked:
                    self._payload.give_back(part.number)
                self.tell()

    def _fetch(self, connection: BulkConnection, part: AskedPart) -> None:
        """Into memory of its own: a thread may end after its transfer, when another one fills the rooms."""
        with self.changed:
            data = self._free.pop() if self._free else bytearray(part.size)
        if len(data) != part.size:  # the last part is shorter
            data = bytearray(part.size)
        connection.read_part(memoryview(data), self.stall)
        sent, digest = connection.read(DIGEST_BYTES, self.stall), xxhash.xxh3_128_digest(data)
        if digest != sent:
            raise CorruptPart(f"part {part.number} does not match its digest")
        with self.changed:
            self._payload.take(part.number, data, digest)
            self._look_for_the_end()
            self.tell_loop()

    def _claim(self, asked: Sequence[AskedPart], most: float) -> AskedPart | None:
        """The part to ask for next; waits for one while nothing is ``asked``. ``None`` when this connection has asked
        for ``most`` bytes, or all parts have come.
        """
        with self.changed:
            self.require_open()
            while True:
                wants_more = len(asked) < LEAST_ASKED_PARTS or sum(it.size for it in asked) < most
                if wants_more and not self._payload.whole:  # else the next payload has not begun
                    part = self._payload.next()
                    self._look_for_the_end()
                    if part is not None:
                        return part
                if asked or self.complete:
                    return None
                self.wait()

    def _look_for_the_end(self) -> None:
        if self._payload.whole:
            self.complete = self._payloads == 0
            self.tell()
