"""Parts over direct connections: they arrive whole and in order, whatever happens to connections."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from itertools import count as numbers
from itertools import repeat
from typing import Any

import pytest

from peer import clock
from peer.p2p.bandwidth import UNLIMITED, Bandwidth
from peer.p2p.bulk import offer
from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.growth import Growth
from peer.p2p.bulk.offer import _Dialler
from peer.p2p.bulk.payload_parts import PayloadParts, window
from peer.p2p.bulk.receiving import PART_REQUEST
from peer.p2p.bulk.secure import Credentials
from peer.p2p.bulk.sending import OutgoingParts
from peer.p2p.bulk.transfer import BulkTransfer, Role
from peer.p2p.payload import DIGEST_BYTES, CorruptPart, receive_parts, send_parts
from peer.p2p.stream import BadMessage, StreamLost
from tests.unit.p2p.bulk.harness import PART, STALL, Sides, part, parts, receive, sides

pytestmark = pytest.mark.real_time


async def both_ways(two: Sides, count: int) -> None:
    one, other = two.caller.stream, two.called.stream
    sends = (send_parts(one, parts(count), STALL), send_parts(other, parts(count), STALL))
    async with asyncio.timeout(60):
        left, right, *_ = await asyncio.gather(receive(one, count), receive(other, count), *sends)
    assert left == right == [part(number) for number in range(count)]


@pytest.mark.parametrize("caller_listens, called_listens", [(False, True), (True, False), (True, True)])
async def test_parts_go_both_ways_whoever_listens(caller_listens: bool, called_listens: bool) -> None:
    async with sides(caller_listens=caller_listens, called_listens=called_listens) as two:
        await two.agree()
        one, other = two.caller.stream, two.called.stream
        assert one.direct is not None and other.direct is not None
        await both_ways(two, 300)
        assert one.all_sent - one.sent == other.all_received - other.received == 300 * PART


async def test_a_side_that_offers_nothing_gets_parts_over_the_stream() -> None:
    async with sides(caller_listens=False, called_listens=False) as two:
        await two.agree()
        assert two.caller.stream.direct is two.called.stream.direct is None
        await both_ways(two, 3)
    async with sides() as two:
        assert two.offers(offer.LEAST_BULK - 1) == (None, None)  # not worth the round trips
        two.caller.stream.origin = "/ip4/127.0.0.1/tcp/1/p2p/QmRelay/p2p-circuit"
        assert [it is not None and it.dials for it in two.offers()] == [False, True]


@pytest.mark.parametrize("role", [Role.PULL, Role.SERVE])
async def test_the_parts_of_a_lost_connection_go_over_another_one(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, in the middle of a part, by the end that has ``role``; the others have the remaining parts."""
    name = "read_part" if role is Role.PULL else "write_part"
    carry, give_back = getattr(BulkConnection, name), PayloadParts.give_back
    number, unanswered = numbers(1), list[int]()

    def fails_once(self: BulkConnection, data: memoryview, timeout: float) -> None:
        cut = next(number) == 50
        carry(self, data[: PART // 2] if cut else data, timeout)
        if cut:
            raise ConnectionResetError("cut")

    def noted(self: PayloadParts, part: int) -> None:
        if part in self._missing:
            unanswered.append(part)
        give_back(self, part)

    monkeypatch.setattr(BulkConnection, name, fails_once)
    monkeypatch.setattr(PayloadParts, "give_back", noted)
    async with sides() as two:
        await two.agree()
        ends = [two.caller.stream.direct, two.called.stream.direct]
        await both_ways(two, 400)
        async with asyncio.timeout(60):  # its thread may still be about to note it
            while "cut" not in [str(it._last_loss) for it in ends if it is not None]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert unanswered


class Asking:
    """A connection that asks for the first part, ``times`` over, and is lost then."""

    def __init__(self, times: int) -> None:
        self.given, self._left = 0, times

    def read(self, count: int, timeout: float) -> bytes:
        if not self._left:
            raise ConnectionResetError("lost")
        self._left -= 1
        return PART_REQUEST.pack(0, 0)

    def write_part(self, data: bytes, timeout: float) -> None:
        self.given += 1

    def write(self, data: bytes, timeout: float) -> None:
        pass


async def test_a_part_is_sent_again_only_after_a_connection_was_lost() -> None:
    """One request for a state made its donor upload without end, a part for each 8 bytes."""
    outgoing = OutgoingParts(asyncio.get_running_loop())
    send = asyncio.ensure_future(outgoing.send(parts(20), STALL))

    async def given(times: int, ends: type[Exception]) -> int:
        connection: Any = Asking(times)
        with pytest.raises(ends):
            await asyncio.to_thread(outgoing.serve, connection)
        return int(connection.given)

    assert await given(1, ConnectionResetError) == 1
    assert await given(1, ConnectionResetError) == 1, "the first one was lost"
    assert await given(1000, BadMessage) == 1, "two were lost"
    assert [await given(1000, BadMessage) for _ in range(5)] == [0] * 5
    send.cancel()


async def test_when_all_are_lost_new_ones_are_made_or_both_sides_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill_all(two: Sides, *, for_good: bool) -> None:
        await asyncio.sleep(0.05)
        transfer = two.called.stream.direct
        assert transfer is not None
        transfer.closed = for_good  # it takes no new ones
        for connection in list(transfer._open):
            connection.shut()

    async def slowly(count: int) -> AsyncIterator[bytes]:
        async for it in parts(count):
            await asyncio.sleep(0.005)
            yield it

    async with sides() as two:
        await two.agree()
        sending = send_parts(two.caller.stream, slowly(50), STALL)
        found, *_ = await asyncio.gather(receive(two.called.stream, 50), sending, kill_all(two, for_good=False))
        assert found == [part(number) for number in range(50)]
    monkeypatch.setattr(offer, "GONE_SECONDS", 0.5)
    async with sides() as two:
        await two.agree()
        sending = send_parts(two.caller.stream, slowly(1000), STALL)
        receiving = receive(two.caller.stream, 1000)
        ended = await asyncio.gather(sending, receiving, kill_all(two, for_good=True), return_exceptions=True)
        assert [type(it) for it in ended[:2]] == [StreamLost, StreamLost]


async def test_a_listener_gives_up_when_one_direction_has_no_connections_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dialler is frozen, or does not know that they are lost; those of the other direction are still there."""

    async def frozen(self: _Dialler, growth: Growth) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(_Dialler, "keep", frozen)
    monkeypatch.setattr(offer, "GONE_SECONDS", 0.5)
    async with sides() as two:
        await two.agree()
        transfer = two.called.stream.direct
        assert transfer is not None
        for connection, role in list(transfer._open.items()):
            if role is Role.PULL:
                connection.shut()
        with pytest.raises(StreamLost):
            await receive(two.called.stream, 1)
        assert transfer.count(Role.SERVE)


async def test_a_partner_that_closes_leaves_the_parts_that_have_come() -> None:
    async with sides() as two:
        await two.agree()
        found = []

        async def receive_some() -> None:
            rooms = (memoryview(bytearray(PART)) for _ in range(100))
            async for number, room, _ in receive_parts(two.caller.stream, rooms, STALL):
                found.append(bytes(room) == part(number))

        async def some() -> AsyncIterator[bytes]:
            async for it in parts(7):
                yield it
            while len(found) < 5:  # noqa: ASYNC110 - a part's arrival is no event
                await asyncio.sleep(0.001)
            two.called.stream.close()
            await asyncio.sleep(STALL)

        with pytest.raises(StreamLost):
            await asyncio.gather(receive_some(), send_parts(two.called.stream, some(), STALL))
        assert len(found) >= 5 and all(found)


async def test_a_part_that_does_not_match_its_digest_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    write = BulkConnection.write

    def false_digest(self: BulkConnection, data: bytes, timeout: float) -> None:
        write(self, bytes(DIGEST_BYTES) if len(data) == DIGEST_BYTES else data, timeout)

    monkeypatch.setattr(BulkConnection, "write", false_digest)
    async with sides() as two:
        await two.agree()
        send = asyncio.ensure_future(send_parts(two.caller.stream, parts(3), STALL))
        with pytest.raises(CorruptPart, match=r"part [0-2] "):
            await receive(two.called.stream, 3)
        send.cancel()


@pytest.mark.parametrize("limits", [("8mbit", None), (None, "8mbit")])
async def test_the_limits_of_a_node_hold_for_all_its_connections(limits: tuple[str | None, str | None]) -> None:
    async with sides() as two:
        sender, receiver = two.caller.stream, two.called.stream
        sender.bandwidth, receiver.bandwidth = Bandwidth.of(limits[0], None), Bandwidth.of(None, limits[1])
        await two.agree()
        began = clock.monotonic()
        await asyncio.gather(send_parts(sender, parts(12), STALL), receive(receiver, 12))
        assert clock.monotonic() - began > 12 * PART / 1e6 - 0.2


async def test_a_receiver_is_never_more_than_a_window_ahead() -> None:
    """What a reader has not taken stays with the sender."""
    size, count = 4 * 2**20, 40
    async with sides() as two:
        await two.agree()
        transfer = two.caller.stream.direct
        assert transfer is not None
        most = window(size)
        made = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal made
            async for it in parts(count, size):
                made += 1
                yield it

        send = asyncio.ensure_future(send_parts(two.caller.stream, counted(), STALL))
        room = memoryview(bytearray(size))
        async for number, _, _ in receive_parts(two.called.stream, repeat(room, count), STALL):
            await asyncio.sleep(0.02 if number else 0.5)
            assert made <= number + most + 6
        await send


def test_a_transfer_that_nobody_holds_waits_for_no_garbage_collection() -> None:
    """A full one is rare."""

    async def talk() -> None:
        credentials = Credentials()
        transfer = BulkTransfer(credentials, UNLIMITED)
        transfer.expect(credentials.certificate)
        contexts = [transfer.context(server=server) for server in (True, False, True)]
        assert contexts[0] is contexts[2] is not contexts[1]
        transfer.close()
        held = weakref.ref(transfer)
        del transfer
        assert held() is None

    gc.disable()
    try:
        asyncio.run(talk())
    finally:
        gc.enable()


async def test_a_transfer_that_is_closed_holds_no_parts() -> None:
    """One that is over is held by its port until the next one, and one that has failed by its error."""
    async with sides() as two:
        await two.agree()
        one, other = two.caller.stream.direct, two.called.stream.direct
        assert one is not None and other is not None
        send = asyncio.ensure_future(one.send(parts(20), STALL))
        receiving = other.receive(repeat(memoryview(bytearray(PART)), 20), STALL)
        await anext(receiving)
        await send
        await anext(receiving)
        assert one.outgoing._parts and other.incoming._free and other.incoming._payload._came
        for it in (one, other):
            it.close()
            assert not it.outgoing._parts and not it.incoming._free and not it.incoming._payload._came
