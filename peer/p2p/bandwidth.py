"""How fast this peer may send and receive in bulk: ``peer.network.max_upload`` and ``max_download``.

Parts (payload.py) and what a relay forwards take their turns here, whatever stream they are on. Messages do not wait.
A download is limited by reading more slowly: then the sender's line is slow, and it is not silent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

from peer import clock
from peer.config.fields import bytes_a_second

Bytes = TypeVar("Bytes", bytes, memoryview)

BURST = 0.1  # seconds of the rate that an idle bucket saves
PIECE = 0.05  # seconds of the rate that take one turn: the other side must see bytes, and streams share


class TokenBucket:
    """``rate``: bytes a second, ``None`` for no limit. Streams take their turns in the order in which they ask."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._turns = threading.Lock()
        self._free = 0.0  # when all that was let through has passed at this rate

    def turn(self, size: int) -> float:
        """Seconds after which ``size`` bytes may pass: behind what was let through before. From any thread."""
        if self.rate is None:
            return 0.0
        with self._turns:
            now = clock.monotonic()
            self._free = max(self._free, now - BURST) + size / self.rate
            return max(0.0, self._free - now)

    async def take(self, size: int) -> None:
        """Return when ``size`` bytes may pass."""
        seconds = self.turn(size)
        if seconds:
            await asyncio.sleep(seconds)

    def take_in_thread(self, size: int) -> None:
        """As :meth:`take`, in a thread that is not an event loop's."""
        seconds = self.turn(size)
        if seconds:  # to sleep for no time lets all other threads go first
            clock.sleep(seconds)

    def pieces(self, data: Bytes) -> Iterator[Bytes]:
        """``data`` in pieces that are to be taken one by one; undivided without a limit."""
        most = len(data) if self.rate is None else max(1, int(self.rate * PIECE))
        for start in range(0, len(data), most or 1):
            yield data if len(data) <= most else data[start : start + most]


@dataclass(frozen=True)
class Bandwidth:
    """Of a node: all its streams share it."""

    up: TokenBucket
    down: TokenBucket

    @classmethod
    def of(cls, max_upload: str | None, max_download: str | None) -> Self:
        """From the settings, such as ``20mbit``."""
        return cls(TokenBucket(bytes_a_second(max_upload)), TokenBucket(bytes_a_second(max_download)))


UNLIMITED = Bandwidth(TokenBucket(), TokenBucket())
