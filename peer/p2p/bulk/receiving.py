"""The receiver's side of a transfer: each connection asks for parts by their numbers, from one counter.

Each one asks for as much as it gets in a set time, so that a fast one never runs dry and the last parts do not wait for
a slow one. What a lost one has asked for and not got, another one asks for. Parts are given out in their order, so a
guard sees the first eighth first.
"""

from __future__ import annotations

import asyncio
import heapq
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial

import xxhash

from peer import clock
from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.handover import Handover
from peer.p2p.payload import DIGEST_BYTES, CorruptPart

PART_REQUEST = struct.Struct("!II")  # a part's number, and the first one that is missing: older ones are not needed
NO_MORE = 2**32 - 1  # instead of a number: all parts have come
ASKED_SECONDS = 1.0  # at its rate, of parts that a connection has asked for and not got: more than a round trip
LEAST_ASKED_PARTS = 2  # the same in parts: one is on its way while another one is asked for
WINDOW_BYTES = 32 * 2**20  # bytes of parts after the first one that is missing or in use
LEAST_WINDOW_PARTS = 4  # parts
SHORTEST_FETCH = 1e-6  # seconds between two parts: a clock may be coarse


def window(size: int) -> int:
    """How many parts of ``size`` bytes may be asked for beyond the first one that is missing or in use."""
    return max(LEAST_WINDOW_PARTS, WINDOW_BYTES // max(size, 1))


class IncomingParts(Handover):
    """Of ``payloads``, one after the other; their parts are numbered on. ``stall``: seconds without a byte after which
    a connection is lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, payloads: int = 1) -> None:
        super().__init__(loop)
        self.stall = 10.0
        self._payloads = payloads  # that have not come
        self._rooms: Iterator[memoryview] | None = None
        self._places: dict[int, memoryview] = {}  # rooms of parts that are asked for or have come
        self._parts: dict[int, tuple[bytearray, bytes]] = {}  # that have come, and their digests
        self._free: list[bytearray] = []  # for further parts
        self._given_back: list[int] = []  # by lost connections; a heap
        self._claimed = self._wanted = self._came = self._first = 0  # parts; the first one of this payload
        self._end: int | None = None  # of this payload, when all its parts are asked for
        self._window = LEAST_WINDOW_PARTS

    async def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]:
        """As :func:`peer.p2p.payload.receive_parts`, for the next payload."""
        number = first = self._claimed
        with self.changed:
            self._rooms, self.stall = iter(rooms), stall
            self._first, self._end = first, None
        while True:
            with self.changed:
                self._wanted = number
                self.changed.notify_all()
            await self.until(partial(self._settled, number))
            if number == self._end:
                return
            with self.changed:
                room, (data, digest) = self._places.pop(number), self._parts.pop(number)
                self._free.append(data)
                room[:] = data
            yield number - first, room, digest
            number += 1

    def pull(self, connection: BulkConnection) -> None:
        """In the connection's thread, until all parts have come. Raises ``OSError``, or the error of the transfer."""
        asked: deque[int] = deque()
        rate, began = 0.0, 0.0  # bytes a second; since when they have come
        try:
            while True:
                while (claimed := self._claim(asked, ASKED_SECONDS * rate)) is not None:
                    number, first = claimed
                    if not asked:
                        began = clock.monotonic()
                    asked.append(number)
                    connection.write(PART_REQUEST.pack(number, first), self.stall)
                if not asked:
                    connection.write(PART_REQUEST.pack(NO_MORE, 0), self.stall)
                    return
                size = self._fetch(connection, asked[0])
                asked.popleft()
                now = clock.monotonic()
                rate, began = (rate + size / max(now - began, SHORTEST_FETCH)) / 2, now
        except CorruptPart as error:
            self.fail(error)
            raise
        finally:
            with self.changed:
                for number in asked:
                    heapq.heappush(self._given_back, number)
                self.tell()

    def _fetch(self, connection: BulkConnection, number: int) -> int:
        """Into memory of its own: a thread may end after its transfer, when another one fills the rooms. Returns the
        part's size in bytes.
        """
        size = len(self._places[number])
        with self.changed:
            data = self._free.pop() if self._free else bytearray(size)
        if len(data) != size:  # the last part is shorter
            data = bytearray(size)
        connection.read_part(memoryview(data), self.stall)
        sent, digest = connection.read(DIGEST_BYTES, self.stall), xxhash.xxh3_128_digest(data)
        if digest != sent:
            raise CorruptPart(f"part {number} does not match its digest")
        with self.changed:
            self._parts[number] = data, digest
            self._came += 1
            self._look_for_the_end()
            self.tell_loop()
        return size

    def _claim(self, asked: Sequence[int], most: float) -> tuple[int, int] | None:
        """The number to ask for next, and the first one that is missing. Waits for one while nothing is ``asked``.
        ``most``: bytes that may be asked for at a time.

        ``None`` when this connection has asked for enough, or when all parts have come.
        """
        with self.changed:
            self.require_open()
            while True:
                held = sum(len(self._places[it]) for it in asked)
                number = self._next() if len(asked) < LEAST_ASKED_PARTS or held < most else None
                if number is not None:
                    return number, self._first_missing()
                if asked or self.complete:
                    return None
                self.wait()

    def _settled(self, number: int) -> bool:
        """Part ``number`` has come, or there is none in this payload."""
        return number in self._parts or number == self._end

    def _look_for_the_end(self) -> None:
        if self._came == self._end and self._rooms is not None:
            self._rooms = None
            self._payloads -= 1
            self.complete = self._payloads == 0
            self.tell()

    def _next(self) -> int | None:
        if self._rooms is None:
            return None
        if self._given_back:
            return heapq.heappop(self._given_back)
        if self._end is not None or self._claimed >= self._wanted + self._window:
            return None
        room = next(self._rooms, None)
        if room is None:
            self._end = self._claimed
            self._look_for_the_end()
            self.tell_loop()
            return None
        if self._claimed == self._first:
            self._window = window(len(room))
        self._places[self._claimed] = room
        self._claimed += 1
        return self._claimed - 1

    def _first_missing(self) -> int:
        return min((it for it in self._places if it not in self._parts), default=self._claimed)
