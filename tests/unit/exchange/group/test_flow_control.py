"""Payloads in turns, each acknowledged, whatever the other side sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.exchange.group import all_reduce, flow_control
from peer.exchange.group.flow_control import SENDERS, FlowControlledStream, FrameKind, turns
from peer.p2p.bandwidth import Bandwidth, TokenBucket
from peer.p2p.payload import Channel, fp32_parts, receive_fp32, send_parts
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.contribution import PART, Vector
from peer.rounds.types import Outcome
from tests.simulated.loop import PROCESS, Process
from tests.unit.exchange.group.harness import many
from tests.unit.virtual import run, stream_pair

STALL, LONG_STALL = 0.4, 10.0


async def test_two_sides_swap_payloads_of_any_length_at_once() -> None:
    """Both write more than the buffers hold before they read the other's acknowledgement."""

    async def side(stream: FlowControlledStream, own: Tensor, out: Tensor, order: asyncio.Semaphore) -> None:
        async def inward() -> None:
            await receive_fp32(stream, out, STALL)
            stream.received()
            await stream.await_acknowledgements(1)

        await asyncio.gather(inward(), stream.send(fp32_parts(Vector(own)), order), stream.acknowledge(1))

    left, right = [FlowControlledStream(it, STALL) for it in await stream_pair()]
    one, two = (torch.randn(numel) for numel in (3 * PART + 5, 5 * PART))
    got_two, got_one = torch.empty_like(two), torch.empty_like(one)
    await asyncio.gather(side(left, one, got_two, turns(one.nbytes)), side(right, two, got_one, turns(two.nbytes)))
    assert torch.equal(one, got_one) and torch.equal(two, got_two)


async def test_a_payload_that_is_not_there_yet_keeps_the_other_side_waiting_for_longer_than_a_stall() -> None:
    streams = await stream_pair()
    sender, receiver = (FlowControlledStream(stream, STALL) for stream in streams)
    ready, own, out = asyncio.Event(), torch.randn(10), torch.empty(10)
    sending = asyncio.gather(sender.send(fp32_parts(Vector(own)), turns(40), ready), sender.await_acknowledgements(1))
    receiving = asyncio.gather(receive_fp32(receiver, out, STALL), receiver.acknowledge(1))
    await asyncio.sleep(2.5 * STALL)
    ready.set()
    await asyncio.sleep(STALL / 2)
    receiver.received()
    await asyncio.wait_for(asyncio.gather(sending, receiving), 5)
    assert torch.equal(own, out)


def test_a_member_sends_to_few_others_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent counts until the other side has it, not until it is written."""
    under_way: dict[Process | None, int] = {}
    most, send = 0, flow_control.send_parts

    async def counted(channel: Channel, data: AsyncIterator[bytes], stall: float) -> None:
        nonlocal most
        me = PROCESS.get()
        under_way[me] = under_way.get(me, 0) + 1
        most = max(most, under_way[me])
        await send(channel, data, stall)

    class Counting(asyncio.Semaphore):
        def release(self) -> None:
            under_way[PROCESS.get()] -= 1
            super().release()

    monkeypatch.setattr(flow_control, "send_parts", counted)
    monkeypatch.setattr(all_reduce, "turns", lambda size: Counting(turns(size)._value))
    monkeypatch.setattr(flow_control, "IN_FLIGHT", 0)
    with many(6, 600) as group:
        results = group.average([Vector(torch.randn(600)) for _ in range(6)])
        assert [it.outcome for it in results] == [Outcome.MERGED] * 6, results
    assert most == 2


@pytest.mark.parametrize(
    "said",
    [
        bytes([9, 0, 0, 0, 0]),  # no such frame
        bytes([FrameKind.DATA, 0, 0, 0, 0]),  # of nothing
        bytes([FrameKind.ACKNOWLEDGED, 0, 0, 0, 1]) + b"x",
        bytes([FrameKind.DATA, 255, 0, 0, 0]),  # above the cap
        bytes([FrameKind.ACKNOWLEDGED, 0, 0, 0, 0]),  # of what was not sent
    ],
)
def test_what_is_no_frame_is_refused(said: bytes) -> None:
    with pytest.raises(BadMessage):
        run(hear(said))


@pytest.mark.parametrize("frame", [bytes([FrameKind.ALIVE, 0, 0, 0, 0]), bytes([FrameKind.DATA, 0, 0, 0, 1]) + b"x"])
async def test_a_flood_of_short_frames_ends_the_stream(frame: bytes) -> None:
    """They were parsed without a pause, and who was flooded was slow for all others."""
    mine, theirs = await stream_pair()
    await theirs.write(frame * 1000, LONG_STALL)
    with pytest.raises(BadMessage, match="more frames"):
        await FlowControlledStream(mine, LONG_STALL).read_into(memoryview(bytearray(1000)), LONG_STALL)
    theirs.close()


@pytest.mark.parametrize(("stall", "rate"), [(STALL, None), (LONG_STALL, None), (LONG_STALL, 1000.0)])
async def test_a_member_that_waits_for_long_or_has_a_slow_line_sends_no_flood(stall: float, rate: float | None) -> None:
    """As many keep-alives as three coroutines send, for a stall before the other side reads, and pieces of parts."""
    mine, theirs = await stream_pair()
    theirs.bandwidth = mine.bandwidth = Bandwidth(TokenBucket(rate), TokenBucket())
    sender = FlowControlledStream(theirs, stall)
    alive = [asyncio.ensure_future(sender._wait_for(asyncio.Event().wait)) for _ in range(SENDERS)]
    await asyncio.sleep(stall)
    own, out = torch.randn(PART if rate is None else 5000), torch.empty(PART if rate is None else 5000)
    sending = asyncio.ensure_future(send_parts(sender, fp32_parts(Vector(own)), stall))
    receiver = FlowControlledStream(mine, stall)
    await receive_fp32(receiver, out, stall)
    await sending
    assert torch.equal(own, out)
    receiver.received()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20 * stall):
            await receiver.await_acknowledgements(1)
    for it in alive:
        it.cancel()


@given(st.binary(max_size=64))
def test_whatever_comes_is_a_payload_or_one_of_the_refusals(said: bytes) -> None:
    try:
        run(hear(said))
    except (BadMessage, StreamLost, TimeoutError):
        return


async def hear(said: bytes) -> None:
    """A stream that awaits four bytes gets ``said`` and the end of the stream."""
    mine, theirs = await stream_pair()
    await theirs.write(said, STALL)
    theirs.close()
    try:
        await FlowControlledStream(mine, STALL).read_into(memoryview(bytearray(4)), STALL)
    finally:
        mine.close()
