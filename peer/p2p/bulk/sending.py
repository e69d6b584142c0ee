"""The sender's side of a transfer: it makes parts in their order, and each connection sends those it is asked for.

A part is kept until the receiver has all before it and itself: a lost connection's parts are asked for again. More than
lost connections had on their way is not sent again: a request of 8 bytes brings a whole part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import xxhash

from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.handover import Handover
from peer.p2p.bulk.payload_parts import window
from peer.p2p.bulk.receiving import NO_MORE, PART_REQUEST
from peer.p2p.stream import BadMessage
from peer.rounds.transfer_rule import IN_BUFFERS, answer_limit

MADE_AHEAD = 4  # parts that are made before they are asked for
LONGEST_REQUEST_PAUSE = 3600.0  # seconds without a request: the transfer ends sooner


class OutgoingParts(Handover):
    """What is sent: parts that are kept until the receiver has them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, payloads: int = 1) -> None:
        super().__init__(loop, payloads)
        self._parts: dict[int, bytes] = {}  # that are made and may be asked for
        self._made = self._asked = self._first = 0  # parts: made, asked for, the first one that the receiver misses
        self._size = 1  # bytes of a part
        self._connections = 0  # that have asked, with those that were lost
        self._given: set[int] = set()  # those of ``_parts`` that a connection was given
        self._once = self._again = 0  # bytes of parts that were given for the first time, and again

    async def send(self, data: AsyncIterator[bytes], stall: float) -> None:
        """As :func:`peer.p2p.payload.send_parts`, the next payload. Returns when all its parts are asked for, or nearly
        so, and after the last one when the receiver has all.
        """
        self.stall = answer_limit(stall, IN_BUFFERS)
        async for part in data:
            await self.until(lambda: self.complete or self._made < min(self._asked + MADE_AHEAD, self._most))
            if self.complete:  # it wants no more: its verdict says why
                return
            with self.changed:
                self._parts[self._made] = part
                self._size = max(self._size, len(part))
                self._made += 1
                self.tell()
        with self.changed:
            self._payloads -= 1
            self.tell()
        if not self._payloads:
            await self.until(lambda: self.complete)

    def forget(self) -> None:
        """It has ended: the memory of its parts is free, whoever still holds the transfer."""
        with self.changed:
            self._parts.clear()

    @property
    def _most(self) -> int:
        """Parts that may be asked for, whatever the receiver says."""
        return self._first + window(self._size) + MADE_AHEAD

    def serve(self, connection: BulkConnection) -> None:
        """In the connection's thread, until the receiver needs no more. Raises ``OSError``, :class:`BadMessage` for
        what no receiver asks for, or the error of the transfer.
        """
        with self.changed:
            self._connections += 1
        while True:
            number, first = PART_REQUEST.unpack(connection.read(PART_REQUEST.size, LONGEST_REQUEST_PAUSE))
            if number == NO_MORE:
                with self.changed:
                    self.complete = True
                    self.tell()
                return
            part = self._part(number, first)
            connection.write_part(part, self.stall)
            connection.write(xxhash.xxh3_128_digest(part), self.stall)

    def _part(self, number: int, first: int) -> bytes:
        """Waits until it is made."""
        with self.changed:
            self.require_open()
            if first > number or first > self._made:
                raise BadMessage("it has parts that were not sent")
            for old in range(self._first, first):
                self._parts.pop(old, None)
                self._given.discard(old)
            self._first = max(self._first, first)
            while number >= self._made:
                if not self._payloads or number >= self._most:
                    raise BadMessage("it asks for a part that is none")
                if number >= self._asked:
                    self._asked = number + 1
                    self.tell_loop()
                self.wait()
            self._asked = max(self._asked, number + 1)
            self.tell_loop()
            if number not in self._parts:
                raise BadMessage("it asks again for a part that it has")
            self._count(number, len(self._parts[number]))
            return self._parts[number]

    def _count(self, number: int, size: int) -> None:
        """Part ``number`` is given. An honest receiver asks for one again only when the connection is lost that had it
        on its way, and each has a window of parts at most.
        """
        if number not in self._given:
            self._given.add(number)
            self._once += size
            return
        self._again += size
        lost = self._connections - 1  # at most: one of them asks now
        if self._again > lost * min(self._once, window(self._size) * self._size):
            raise BadMessage("it asks again for more than its lost connections had asked for")
