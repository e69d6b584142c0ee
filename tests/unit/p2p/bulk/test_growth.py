"""How many connections a transfer makes, and how much each of them asks for."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from itertools import repeat
from typing import Any

import pytest
import xxhash

from peer import clock
from peer.p2p.bulk import growth, offer, transfer
from peer.p2p.bulk.growth import FIRST_CONNECTIONS, Growth
from peer.p2p.bulk.receiving import IncomingParts
from peer.p2p.bulk.transfer import BulkTransfer, Role
from peer.p2p.payload import send_parts
from tests.unit.p2p.bulk.harness import STALL, part, parts, receive, sides

pytestmark = pytest.mark.real_time


class Line:
    """A connection of ``rate`` bytes a second whose answers come after ``trip``; ``held``: bytes asked for, at most."""

    def __init__(self, rate: float, trip: float, size: int) -> None:
        self.now = self.held = 0.0
        self._rate, self._trip, self._size = rate, trip, size
        self._asked: deque[float] = deque()
        self._digest = xxhash.xxh3_128_digest(bytes(size))

    def write(self, data: bytes, timeout: float) -> None:
        self._asked.append(self.now)
        self.held = max(self.held, len(self._asked) * self._size)

    def read_part(self, room: memoryview, timeout: float) -> None:
        self.now = max(self.now, self._asked[0] + self._trip) + len(room) / self._rate

    def read(self, count: int, timeout: float) -> bytes:
        self._asked.popleft()
        return self._digest


@pytest.mark.parametrize(("rate", "most_held"), [(50e6, 50e6), (1e6, 1.1e6)])
async def test_a_connection_asks_for_what_it_gets_in_a_second(
    rate: float, most_held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast and long one waited for its own requests (2 MiB a round trip), and a slow one held the last parts."""
    size, count = 2**18, 120
    line: Any = Line(rate, 0.2, size)
    monkeypatch.setattr("peer.clock.monotonic", lambda: line.now)
    incoming = IncomingParts(asyncio.get_running_loop())
    arriving = incoming.receive(repeat(memoryview(bytearray(size)), count), STALL)
    first = asyncio.ensure_future(anext(arriving))
    await asyncio.sleep(0)
    incoming.pull(line)
    assert [(await first)[0], *[number async for number, _, _ in arriving]] == list(range(count))
    assert line.now < 1.5 * count * size / rate + 0.5
    assert 2 * size <= line.held <= most_held


def carried(growing: Growth, line: int, each: int = 1000, looks: int = 40) -> list[int]:
    """The counts at each look, on a line that carries what ``line`` connections of ``each`` bytes a second carry."""
    moved, counts = each, [growing.look(0, 1.0), growing.look(each, 1.0)]
    for _ in range(looks):
        moved += min(growing.wanted, line) * each
        counts.append(growing.look(moved, 1.0))
    return counts


def test_connections_are_added_as_long_as_the_total_grows() -> None:
    growing = Growth(trip=0.0)
    assert growing.wanted == FIRST_CONNECTIONS and growing.period == growth.LOOK_PERIOD
    counts = carried(growing, 12)
    assert counts[:3] == [2, 2, 2] and sorted(set(counts)) == [2, 4, 8, 16]
    assert growing.settled and growing.useful == 16
    assert Growth(trip=0.1).period == 0.4


def test_connections_that_carry_no_more_are_not_made_again() -> None:
    """Each round of growth disturbs the line."""
    alone = Growth(trip=0.1)
    counts = carried(alone, 2)  # two connections fill the line
    assert set(counts) == {2, 4} and alone.settled and alone.useful == 2
    known = Growth(0.1, alone.useful)
    assert set(carried(known, 16)) == {2}


def test_a_rate_that_rises_by_itself_is_not_taken_for_that_of_more_connections() -> None:
    growing, moved = Growth(trip=0.0), 1
    for _ in range(6):  # TCP's slow start
        moved *= 2
        assert growing.look(moved, 1.0) == FIRST_CONNECTIONS


def test_one_slow_look_at_the_end_of_a_transfer_settles_nothing() -> None:
    growing = Growth(trip=0.0)
    moved, wanted = 1000, growing.look(1000, 1.0)
    while wanted == FIRST_CONNECTIONS:
        moved += 1000
        wanted = growing.look(moved, 1.0)
    assert growing.look(moved, 1.0) == wanted and not growing.settled


def test_looks_without_a_byte_add_no_connections() -> None:
    """An overlapped swap's parts cross within a look, and the next ones come with the next inner step."""
    growing = Growth(trip=0.0)
    assert [growing.look(1000, 1.0) for _ in range(5)] == [FIRST_CONNECTIONS] * 5 and not growing.settled


async def test_a_transfer_that_has_had_all_its_connections_dials_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dial would be a TLS handshake for a connection that is closed at once."""
    looks, dialled, connect = list[int](), list[Role](), offer.connect

    def look(self: Growth, moved: int, seconds: float) -> None:
        looks.append(moved)
        self.wanted = 6

    async def counted(host: str, port: int, bulk: BulkTransfer, role: Role) -> ssl.SSLSocket:
        dialled.append(role)
        return await connect(host, port, bulk, role)

    monkeypatch.setattr(growth, "LOOK_PERIOD", 0.01)
    monkeypatch.setattr(transfer, "MOST_OPENED", 2 * FIRST_CONNECTIONS)
    monkeypatch.setattr(Growth, "look", look)
    monkeypatch.setattr(offer, "connect", counted)
    async with sides() as two:
        await two.agree()
        while len(looks) < 5:  # noqa: ASYNC110 - a look is no event
            await asyncio.sleep(0.001)
        assert len(dialled) == 2 * FIRST_CONNECTIONS


async def test_both_directions_have_as_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with more takes the line from the other: a swap got 0.65 of a line, and 0.86 with as many in both."""
    monkeypatch.setattr(growth, "LOOK_PERIOD", 0.01)
    monkeypatch.setattr(Growth, "look", lambda self, moved, seconds: setattr(self, "wanted", 6 if moved else 2))
    async with sides() as two:
        await two.agree()
        bulk = two.caller.stream.bulk
        assert bulk is not None

        async def held_back() -> AsyncIterator[bytes]:
            """The last one, until both have as many: a fast machine must not be done before."""
            async for it in parts(20):
                if it == part(19):
                    while min(map(bulk.count, Role)) < 6:  # noqa: ASYNC110 - threads count, and no event says so
                        await asyncio.sleep(0.01)
                yield it

        await asyncio.gather(send_parts(two.caller.stream, held_back(), STALL), receive(two.called.stream, 20))


async def test_what_was_useful_with_a_member_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LOOK_PERIOD", 0.01)
    async with sides() as two:
        port, remote = two.caller.port, two.caller.stream.remote
        port._note_useful(remote, 5)
        port._note_useful(remote, 7)  # it is known already
        await two.agree()
        bulk = two.caller.stream.bulk
        assert bulk is not None and [bulk.count(role) for role in Role] == [5, 5]
        later = clock.monotonic() + offer.USEFUL_SECONDS
        monkeypatch.setattr("peer.clock.monotonic", lambda: later)
        assert port._useful_with(remote) is None
