"""Which parts of one payload to ask for, and which have come. Pure: IncomingParts holds its lock around each call."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WINDOW_BYTES = 32 * 2**20  # bytes of parts after the first one that is missing or in use
LEAST_WINDOW_PARTS = 4  # parts
ArrivedPart = tuple[memoryview, bytearray, bytes]  # the reader's room for it, its bytes, their digest, which is right


def window(size: int) -> int:
    """How many parts of ``size`` bytes may be asked for beyond the first one that is missing or in use."""
    return max(LEAST_WINDOW_PARTS, WINDOW_BYTES // max(size, 1))


class AskedPart(NamedTuple):
    """A part to ask for. ``size``: bytes; ``first_missing``: the sender may forget the parts before it."""

    number: int
    size: int
    first_missing: int


class PayloadParts:
    """One payload. Numbers go on from one payload of a transfer to the next: a part of an earlier one, whose reader has
    given up, counts for nothing here.
    """

    def __init__(self, rooms: Iterable[memoryview], first: int = 0) -> None:
        """``rooms``: one for each part; ``first``: the number of the first part."""
        self.wanted = first  # the part that the reader waits for, or uses
        self.claimed = first  # the next part that was never asked for
        self.end: int | None = None  # the number after the last part, once there is no further room
        self._rooms: Iterator[memoryview] = iter(rooms)
        self._size = 1  # bytes of the largest part
        self._missing: dict[int, memoryview] = {}  # rooms of parts that were asked for and have not come
        self._given_back: list[int] = []  # those whose connection was lost: they are asked for first; a heap
        self._came: dict[int, ArrivedPart] = {}  # that the reader has not taken

    def next(self) -> AskedPart | None:
        """The part to ask for now: one that was given back, else a new one within the window; ``None`` without one."""
        if self._given_back:
            return self._asked(heapq.heappop(self._given_back))
        if self.end is not None or self.claimed >= self.wanted + window(self._size):
            return None
        room = next(self._rooms, None)
        if room is None:
            self.end = self.claimed
            return None
        self._size = max(self._size, len(room))
        self._missing[self.claimed] = room
        self.claimed += 1
        return self._asked(self.claimed - 1)

    def give_back(self, number: int) -> None:
        """The connection that has asked for part ``number`` is lost."""
        if number in self._missing:
            heapq.heappush(self._given_back, number)

    def take(self, number: int, data: bytearray, digest: bytes) -> None:
        """Part ``number`` has come."""
        room = self._missing.pop(number, None)
        if room is not None:
            self._came[number] = room, data, digest

    def arrived_or_absent(self, number: int) -> bool:
        """Part ``number`` has come, or there is none in this payload."""
        return number in self._came or number == self.end

    def give_out(self, number: int) -> ArrivedPart:
        """Part ``number``, which has come, for the reader."""
        return self._came.pop(number)

    @property
    def first_missing(self) -> int:
        """The first part that has not come; parts come in any order."""
        return min(self._missing, default=self.claimed)

    @property
    def whole(self) -> bool:
        """All parts have come."""
        return self.end is not None and not self._missing

    def _asked(self, number: int) -> AskedPart:
        return AskedPart(number, len(self._missing[number]), self.first_missing)
