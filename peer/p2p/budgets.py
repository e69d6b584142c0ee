"""How much a node does for others: for each remote id, and for all ids together. The only table.

An id costs an attacker little, so what all others may use together is bounded too. Ids that have proved to be good
(a swap with them succeeded) are counted by themselves: no crowd of new ids takes their share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from peer import clock
from peer.rounds.backoff import Proven
from peer.rounds.types import Newest

COUNTED = 4096  # ids


@dataclass(frozen=True)
class Rate:
    """``each``: units a second for one id; ``all``: for all that are not proven; ``burst``: seconds of it at once."""

    each: float
    all: float
    burst: float


@dataclass(frozen=True)
class Limit:
    """At once: ``each`` for one id, ``all`` for all that are not proven."""

    each: int
    all: int


DHT_REQUESTS = Rate(each=40, all=400, burst=10)
DHT_BYTES = Rate(each=64 * 1024, all=2 * 1024 * 1024, burst=10)  # of requests and of our answers
RECORDS = Limit(each=32, all=16_384)  # that a node keeps: at most 48 MiB
STREAMS = Limit(each=32, all=384)  # a stream is an open file
STREAM_OPENINGS = Rate(each=20, all=200, burst=10)
RESERVATIONS = 128  # of peers behind NAT at a relay that are not proven, one for each
RESERVATION_STREAMS = Limit(each=2, all=160)  # one may hang, and who finds no place is told so
CIRCUITS = Limit(each=32, all=256)  # through a relay; unused ones make room for new ones
HOPS = Limit(each=40, all=320)  # some are ending, and who finds no room is told so
CIRCUIT_BYTES = Rate(each=8 * 2**20, all=32 * 2**20, burst=4)  # that a relay forwards; more of them wait
HALF_OPEN = Limit(each=32, all=128)  # connections to the bulk port without certificate and token; each: an IP address
BULK_TRANSFERS = Limit(each=2, all=8)  # by direct connections, of which each is a thread and an open file
STATE_REQUESTS = Rate(each=1 / 60, all=1 / 15, burst=240)  # that are given: each is copied while the training waits
DIALBACKS = Rate(each=1 / 2, all=5, burst=60)  # questions; each: an IP address
SPEED_TESTS = Rate(each=1 / 300, all=1 / 180, burst=1800)  # of 16 MiB and 4 s at most, one at a time (speed.py)
PACE = 0.1  # seconds between two attempts to spend, at least


class Spending:
    """What others have used of a :class:`Rate`: one token bucket for each id, one for all."""

    def __init__(self, rate: Rate, proven: Proven) -> None:
        self._rate, self._proven = rate, proven
        self._left = Newest[tuple[float, float]](COUNTED)  # units, and the time at which they were left

    def spend(self, remote: str, units: float = 1.0) -> bool:
        """Count ``units`` for ``remote``; ``False``, and nothing is counted, when it has no more."""
        return self.wait(remote, units) == 0

    def wait(self, remote: str, units: float = 1.0) -> float:
        """0 when ``remote`` has ``units``, which are counted; else the seconds until it may have them."""
        buckets, now = self._buckets(remote), clock.monotonic()
        left = {name: self._now(name, rate, now) - units for name, rate in buckets.items()}
        if min(left.values()) < 0:
            return max(-units_left / buckets[name] for name, units_left in left.items())
        for name, units_left in left.items():
            self._left[name] = units_left, now
        return 0.0

    def left(self, remote: str) -> float:
        """The units that ``remote`` has."""
        now = clock.monotonic()
        return min(self._now(name, rate, now) for name, rate in self._buckets(remote).items())

    async def pace(self, remote: str, units: float) -> None:
        """:meth:`spend` as soon as it can be done. The caller sets the deadline."""
        while seconds := self.wait(remote, units):  # noqa: ASYNC110 - the units come with time, and no event says so
            await asyncio.sleep(max(PACE, seconds))

    def _buckets(self, remote: str) -> dict[str, float]:
        """Units a second, by the name of each bucket from which it spends."""
        return {remote: self._rate.each} | ({} if remote in self._proven else {"": self._rate.all})

    def _now(self, name: str, rate: float, now: float) -> float:
        most = rate * self._rate.burst
        left, since = self._left.get(name, (most, now))
        return min(most, left + rate * (now - since))


class Places:
    """What others hold of a :class:`Limit`."""

    def __init__(self, limit: Limit, proven: Proven) -> None:
        self._limit, self._proven = limit, proven
        self._held: dict[str, list[Callable[[], bool]]] = {}  # by id; each says whether it is held still

    def take(self, remote: str, held: Callable[[], bool]) -> bool:
        """A place for as long as ``held`` says so; ``False`` when there is none."""
        live = {peer_id: [it for it in places if it()] for peer_id, places in self._held.items()}
        self._held = {peer_id: places for peer_id, places in live.items() if places}
        others = sum(len(places) for peer_id, places in self._held.items() if peer_id not in self._proven)
        full = remote not in self._proven and others >= self._limit.all
        if full or len(self._held.get(remote, ())) >= self._limit.each:
            return False
        self._held.setdefault(remote, []).append(held)
        return True
