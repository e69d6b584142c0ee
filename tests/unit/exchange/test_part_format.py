"""All users of the part format: a flipped byte, a stream that ends early and a size that does not fit are refused.

Nothing of what is refused is applied: a blocking swap and a group use nothing at all, an overlapped swap and a newcomer
only the parts before.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from peer.exchange.group import flow_control
from peer.exchange.group.flow_control import FlowControlledStream
from peer.p2p.event_loop import LoopThread
from peer.p2p.payload import Channel
from peer.p2p.stream import BadMessage, Stream, StreamLost
from peer.rounds.backoff import Proven
from peer.rounds.contribution import PART, Vector
from peer.rounds.state import State
from peer.rounds.types import Group, Link, Outcome, Seat
from peer.swarm.state_transfer.donor import Donor
from peer.swarm.state_transfer.download import PartialState, download
from tests.unit.exchange.group.harness import EXACT, group_exchange, many
from tests.unit.exchange.pair_harness import at_once, pair_exchange
from tests.unit.exchange.test_pair_overlapped import NUMEL as OVERLAPPED_NUMEL
from tests.unit.exchange.test_pair_overlapped import Trainee, both, changed
from tests.unit.virtual import stream_pair

NUMEL = 2 * PART + 100
FAULTS = ["flipped", "truncated", "oversized"]
REFUSED = {
    "flipped": {Outcome.CORRUPT},
    "truncated": {Outcome.TIMEOUT},
    "oversized": {Outcome.REFUSED, Outcome.TIMEOUT},  # the other side may see only that it was left
}


class Faulty:
    """A channel whose second part is sent with a flipped byte, or breaks off in the middle."""

    def __init__(self, stream: Channel, fault: str, line: Stream) -> None:
        self._write, self._read, self._fault, self._line = stream.write, stream.read_into, fault, line
        self._parts, self.bandwidth, self.direct = 0, stream.bandwidth, None

    async def write(self, data: bytes, timeout: float) -> None:
        self._parts += len(data) > 100  # longer than a message, a digest and the head of a frame
        if self._parts == 2 and len(data) > 100:
            if self._fault == "truncated":
                await self._write(data[: len(data) // 2], timeout)
                self._line.close()
                raise StreamLost("closed by the test")
            if self._fault == "flipped":
                data = data[:77] + bytes([data[77] ^ 1]) + data[78:]
        await self._write(data, timeout)

    async def read_into(self, out: memoryview, timeout: float) -> None:
        await self._read(out, timeout)


def sabotage(stream: Stream, fault: str) -> Stream:
    """The faults of :class:`Faulty` in the parts that ``stream`` sends; its messages, which are as long, arrive."""
    faulty = Faulty(stream, fault, stream)
    send = stream.send

    async def honest(message: object, timeout: float) -> None:
        await send(message, timeout)  # type: ignore[arg-type]
        faulty._parts = 0

    stream.write, stream.send = faulty.write, honest  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize("fault", FAULTS)
def test_a_blocking_swap_uses_nothing(thread: LoopThread, fault: str) -> None:
    ours, theirs = thread.call(stream_pair(), 5)
    own, sent = torch.randn(NUMEL), 2 * NUMEL if fault == "oversized" else NUMEL
    sides = [(own, "B", ours), (torch.randn(sent), "A", sabotage(theirs, fault))]
    averaged, other = at_once(
        partial(pair_exchange(thread, it.numel()).average, Vector(it), Group(0, (Link(name, name, stream),)))
        for it, name, stream in sides
    )
    assert other.outcome is not Outcome.MERGED
    assert averaged.outcome in REFUSED[fault], averaged.detail
    assert (averaged.culprits == ("B",)) == (averaged.outcome is not Outcome.REFUSED or fault == "oversized")
    assert torch.equal(averaged.mean, own)
    assert averaged.bytes_received < 4 * NUMEL


@pytest.mark.parametrize("fault", FAULTS)
def test_an_overlapped_swap_uses_the_parts_before(thread: LoopThread, fault: str) -> None:
    ours, theirs = thread.call(stream_pair(), 5)
    sent = OVERLAPPED_NUMEL * (2 if fault == "oversized" else 1)
    one, two = Trainee(thread, torch.randn(OVERLAPPED_NUMEL)), Trainee(thread, torch.randn(sent))
    before = one.vector.clone()
    averaged, other = both(one, two, (ours, sabotage(theirs, fault)))
    assert averaged.outcome in REFUSED[fault], averaged.detail
    assert fault != "flipped" or "part 1 does not match" in averaged.detail
    assert other.outcome is not Outcome.MERGED
    assert changed(one, before) == ([] if fault == "oversized" else [0])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_uses_nothing(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    numel = 9 * PART  # three parts for each of three members
    tensors = [torch.full((numel,), 1.0 + place) for place in range(3)]
    send = flow_control.send_parts

    async def faulty(stream: FlowControlledStream, data: AsyncIterator[bytes], stall: float) -> None:
        first = await anext(data)
        bad = struct.unpack_from("<f", first)[0] == 3.0 and fault != "oversized"  # of the third member
        channel = Faulty(stream, fault, stream._stream) if bad else stream

        async def all_parts() -> AsyncIterator[bytes]:
            yield first
            async for part in data:
                yield part

        await send(channel, all_parts(), stall)

    monkeypatch.setattr(flow_control, "send_parts", faulty)
    with many(3, numel) as group:
        if fault == "oversized":
            tensors[2], last = torch.ones(2 * numel), group.members[2]
            group.exchanges[2] = group_exchange(last, group.members, 2 * numel, EXACT)
        results = group.average([Vector(tensor) for tensor in tensors])
    for it, tensor in zip(results, tensors, strict=True):
        assert it.outcome in REFUSED[fault], it
        assert torch.equal(it.mean, tensor)


class OneDonor:
    """A node that reaches one donor."""

    def __init__(self, donor: Donor, fault: str) -> None:
        self._donor, self._fault = donor, fault
        self.serving: asyncio.Future[None] | None = None

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        ours, theirs = await stream_pair()
        self.serving = asyncio.ensure_future(self._donor.serve(sabotage(theirs, self._fault)))
        return ours


@pytest.mark.parametrize("fault", FAULTS)
def test_a_newcomer_keeps_the_parts_before_and_takes_the_rest_of_another_donor(thread: LoopThread, fault: str) -> None:
    given = [torch.randn(NUMEL), torch.randn(NUMEL)]
    sent = [torch.randn(2 * NUMEL)] * 2 if fault == "oversized" else given
    room: list[Tensor] = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    newcomer = PartialState(room)

    async def take(vectors: Sequence[Tensor], fault: str) -> State:
        node = OneDonor(Donor(lambda: State(10, 1, vectors), Proven()), fault)
        try:
            return await download(node, Seat("Qm", "donor"), newcomer)  # type: ignore[arg-type]
        finally:
            assert node.serving is not None
            await asyncio.gather(node.serving, return_exceptions=True)

    with pytest.raises((BadMessage, StreamLost)):
        thread.call(take(sent, fault), 20)
    assert newcomer.have == (0 if fault == "oversized" else 1)
    thread.call(take(given, "none"), 20)
    assert all(torch.equal(got, it) for got, it in zip(room, given, strict=True))
