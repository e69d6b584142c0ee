"""A group's average over direct connections: real sockets, TLS and threads. What is averaged stays the same."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.exchange.group import all_reduce, streams
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.flow_control import FlowControlledStream, FrameKind, turns
from peer.exchange.group.protocol import GroupProtocol
from peer.exchange.group.streams import GroupStreams
from peer.p2p.bulk import offer
from peer.p2p.bulk.connection import BulkConnection
from peer.p2p.bulk.sending import OutgoingParts
from peer.p2p.bulk.transfer import BulkTransfer, Role
from peer.p2p.deadline import together
from peer.p2p.payload import fp32_parts, receive_fp32
from peer.p2p.stream import BadMessage
from peer.rounds.contribution import PART, Averaged, Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.group.harness import EXACT, Many, many
from tests.unit.exchange.group.test_average import contributions, outcomes, sparse, vectors
from tests.unit.p2p.bulk.harness import patient
from tests.unit.virtual import run, stream_pair

NUMEL = 6 * PART + 17  # for two members and more: two parts of each slice at least
LATE, WAIT = 1.0, 60.0  # seconds
WAITING = EXACT.model_copy(update={"stall": WAIT})  # for tests of no stall, on a machine that may be busy
Sent = Counter[str]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Payloads by whether they went over direct connections. All transfers are large enough for these."""
    monkeypatch.setattr(offer, "LEAST_BULK", 0)
    patient(monkeypatch)
    monkeypatch.setattr(streams, "HELLO_TIMEOUT", WAIT)
    counted, send, begin, counting = Counter[str](), FlowControlledStream.send, BulkTransfer.send, threading.Lock()

    def count(what: str) -> None:
        with counting:  # each member has a thread
            counted[what] += 1

    async def any_way(self: FlowControlledStream, *args: Any, **named: Any) -> None:
        count("all")
        await send(self, *args, **named)

    async def directly(self: BulkTransfer, *args: Any) -> None:
        count("direct")
        await begin(self, *args)

    monkeypatch.setattr(FlowControlledStream, "send", any_way)
    monkeypatch.setattr(BulkTransfer, "send", directly)
    return counted


def averaged(group: Many, tensors: Sequence[Tensor]) -> list[Averaged]:
    found = group.average(contributions(tensors))
    assert outcomes(found) == [Outcome.MERGED] * len(tensors), [it.detail for it in found]
    return found


@pytest.mark.parametrize(("count", "codec"), [(2, "none"), (3, "int8"), (5, "int4"), (3, "int2")])
def test_the_same_bits_as_without_them(count: int, codec: str, sent: Sent) -> None:
    tensors, settings = vectors(count, NUMEL), EXACT.model_copy(update={"codec": codec, "stall": WAIT})
    with many(count, NUMEL, settings=settings) as group:
        plain = averaged(group, tensors)
    assert not sent["direct"]
    sent.clear()
    with many(count, NUMEL, settings=settings, real=True) as group:
        group.listen()
        for rounds in (1, 2):
            found = averaged(group, tensors)
            assert sent["direct"] == sent["all"] == rounds * 3 * count * (count - 1)
            if rounds == 1:  # in the second one what int2 has lost is sent too
                assert all(torch.equal(it.mean, plain[0].mean) for it in found)
                assert all(it.bytes_sent >= plain[0].bytes_sent - 200 * count for it in found)
                assert sum(it.bytes_sent for it in found) >= sum(it.bytes_received for it in found)


def test_sparse_contributions_go_over_them_too(sent: Sent) -> None:
    given = [sparse(seed) for seed in range(3)]
    count = len(given[0].values)
    with many(3, count, 600, real=True) as group:
        group.listen()
        results = group.average(given)
    with many(3, count, 600) as group:
        plain = group.average(given)
    assert outcomes(results) == [Outcome.MERGED] * 3
    assert all(torch.equal(it.mean, plain[0].mean) for it in results)
    assert sent["direct"] == 12  # each sends its contribution and its digests to both others


def test_a_mean_that_is_late_is_waited_for(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for its parts before they are there: a connection that waits would be given up after a stall."""
    judge, there = all_reduce._Reduction._average, threading.Event()

    def slow(self: all_reduce._Reduction, *args: list[float]) -> None:
        if self._me == 1:
            time.sleep(LATE)
        judge(self, *args)
        if self._me == 1:
            there.set()

    part, asked = OutgoingParts._part, list[bool]()

    def noted(self: OutgoingParts, number: int, first: int) -> bytes:
        if self._loop is group.members[1].thread.loop and number >= 3:  # its slice for the other one is three parts
            asked.append(there.is_set())
        return part(self, number, first)

    take, taken = BulkTransfer.take, Counter[str]()

    def counted(self: BulkTransfer, sock: ssl.SSLSocket, role: Role) -> None:
        taken["connections"] += 1
        take(self, sock, role)

    monkeypatch.setattr(all_reduce._Reduction, "_average", slow)
    monkeypatch.setattr(streams, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(BulkTransfer, "take", counted)
    monkeypatch.setattr(OutgoingParts, "_part", noted)
    with many(3, NUMEL, settings=WAITING, real=True) as group:
        group.listen()
        averaged(group, vectors(3, NUMEL))
    assert asked == [True] * 8, "by each of the two: three parts of the mean, one of what is shown of it"
    assert sent["direct"] == 18
    assert taken["connections"] == 12, "one of each direction, at both ends: none was lost"


def test_a_lost_connection_is_replaced(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = BulkConnection.write_part, Counter[str]()

    def fails_once(self: BulkConnection, data: bytes, timeout: float) -> None:
        written["parts"] += 1
        if written["parts"] in (3, 8):
            raise ConnectionResetError("cut")
        write(self, data, timeout)

    monkeypatch.setattr(BulkConnection, "write_part", fails_once)
    with many(3, NUMEL, settings=WAITING, real=True) as group:
        group.listen()
        averaged(group, vectors(3, NUMEL))
    assert written["parts"] > 8


def test_a_member_that_dies_amid_the_round_is_named(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = AllReduceExchange._combine

    async def dies(self: AllReduceExchange, own: Vector, all: GroupStreams) -> None:
        if all.assembly.me != 1:
            await combine(self, own, all)
        for stream in (*all.by_place.values(), *all.assembly.controls.values()):
            stream.close()

    monkeypatch.setattr(AllReduceExchange, "_combine", dies)
    monkeypatch.setattr(GroupProtocol, "_digest", lambda self: "")
    with many(3, NUMEL, settings=WAITING, real=True) as group:
        group.listen()
        results = group.average(contributions(vectors(3, NUMEL)))
    left = [results[0], results[2]]
    assert all((it.outcome, it.culprits[:1]) == (Outcome.TIMEOUT, ("b",)) for it in left)


class Beside:
    """Connections on which a payload takes ``there`` seconds to the other side, and ``back`` from it."""

    ready, sent, received = True, 0, 0

    def __init__(self, there: float = 0.0, back: float = 0.0) -> None:
        self._there, self._back = there, back

    async def send(self, data: AsyncIterator[bytes], stall: float) -> None:
        await asyncio.sleep(self._there)

    async def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]:
        await asyncio.sleep(self._back)
        for number, room in enumerate(rooms):
            yield number, room, b""

    def close(self) -> None:
        pass


async def test_a_payload_that_takes_longer_than_a_stall_is_no_silence() -> None:
    """One side has all that it gets and still sends."""
    stall = 0.2

    async def side(flow: FlowControlledStream) -> None:
        async def inward() -> None:
            await receive_fp32(flow, torch.empty(3), stall)
            flow.received()
            await flow.await_acknowledgements(1)

        await together([inward(), flow.send(fp32_parts(Vector(torch.ones(3))), turns(12)), flow.acknowledge(1)])

    one, other = await stream_pair()
    one.bulk, other.bulk = Beside(there=4 * stall), Beside(back=4 * stall)  # type: ignore[assignment]
    await together([side(FlowControlledStream(it, stall)) for it in (one, other)])


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ((FrameKind.BEGUN,), False),
        ((FrameKind.BEGUN, FrameKind.ALIVE), False),
        ((FrameKind.BEGUN, FrameKind.BEGUN), True),
        ((FrameKind.DATA,), True),
        ((FrameKind.ALIVE, 5), True),
    ],
)
def test_only_frames_that_fit_are_read_beside_them(said: tuple[int, ...], *, refused: bool) -> None:
    async def hear() -> bool:
        one, other = await stream_pair()
        other.bulk = Beside()  # type: ignore[assignment]
        flow = FlowControlledStream(other, 0.1)
        for kind in said:
            await one.write(bytes([kind]) + (1 if kind == FrameKind.DATA else 0).to_bytes(4, "big"), 1)
        try:
            await flow.acknowledge(1)
        except BadMessage:
            return True
        except TimeoutError:  # nothing more comes
            return False
        raise AssertionError

    assert run(hear()) is refused


async def test_a_frame_that_begins_a_payload_needs_them() -> None:
    one, other = await stream_pair()
    await one.write(bytes([FrameKind.BEGUN, 0, 0, 0, 0]), 1)
    with pytest.raises(BadMessage):
        await FlowControlledStream(other, 0.1).await_acknowledgements(1)
