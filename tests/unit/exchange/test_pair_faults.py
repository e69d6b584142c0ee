"""A partner that breaks off, lies or freezes at any stage of a swap; its side is played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import uvloop

from peer import clock
from peer.config.schema import CodecName
from peer.exchange.codec import size
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.protocol import both_ways
from peer.exchange.pair.wire import Acknowledgement, Header, Unusable
from peer.p2p.deadline import LEAVING_SECONDS
from peer.p2p.event_loop import LoopThread
from peer.p2p.payload import fp32_parts, receive_fp32, send_parts
from peer.p2p.stream import Stream, StreamLost
from peer.rounds import transfer_rule
from peer.rounds.contribution import PART, Averaged, Contribution, Vector
from peer.rounds.types import Group, Link, Outcome, Reason, Verdict
from tests.unit.exchange.pair_harness import FAST, PHASE, at_once, header, pair_exchange
from tests.unit.virtual import run, stream_pair, took

NUMEL = PART + 100
Partner = Callable[[Stream], Awaitable[None]]


def swap(thread: LoopThread, partner: Partner, initiator: bool = True) -> Averaged:
    """Our side of a swap against ``partner``; checks what holds whatever the partner does."""
    pair = thread.call(stream_pair(), 5)
    ours, theirs = pair if initiator else pair[::-1]
    playing = asyncio.run_coroutine_threadsafe(partner(theirs), thread.loop)  # type: ignore[arg-type]
    hung_up: list[bool] = []
    ours.hang_up = lambda: hung_up.append(True)
    own = torch.randn(NUMEL)
    kept = own.clone()
    averaged = pair_exchange(thread, NUMEL).average(Vector(own), Group(0, (Link("B", "b", ours),), phase_seconds=PHASE))
    assert torch.equal(own, kept)
    if averaged.outcome is not Outcome.MERGED:
        assert torch.equal(averaged.mean, own)
    silent = averaged.outcome is Outcome.TIMEOUT and "gone" not in averaged.detail
    assert bool(hung_up) == silent  # who has gone has closed the connection by itself
    failed = averaged.outcome in (Outcome.CORRUPT, Outcome.POISONED, Outcome.TIMEOUT)
    assert (averaged.culprits == ("B",)) == (failed or averaged.reason is Reason.HEADER)
    playing.cancel()
    return averaged


def both(
    sides: Sequence[PairExchange], vectors: Sequence[Contribution], streams: Sequence[Stream]
) -> Sequence[Averaged]:
    """A swap of two exchanges."""
    return at_once(
        partial(side.average, vector, Group(0, (Link("B", "b", stream),)))
        for side, vector, stream in zip(sides, vectors, streams, strict=True)
    )


async def exchange_payloads(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    await stream.receive(Header, 1)
    sending = send_parts(stream, fp32_parts(Vector(torch.randn(NUMEL))), 1)
    await asyncio.gather(sending, receive_fp32(stream, torch.empty(NUMEL), 1))


@pytest.mark.parametrize("initiator", [True, False])
def test_another_size_is_refused_before_it_is_read(thread: LoopThread, initiator: bool) -> None:
    async def partner(stream: Stream) -> None:
        await stream.send(header(10**12), 1)

    averaged = swap(thread, partner, initiator)
    assert (averaged.outcome, "payload_bytes" in averaged.detail) == (Outcome.REFUSED, True)
    assert averaged.culprits == ("B",)  # it cost nothing, in each round again
    assert averaged.bytes_received < 1000


async def silent(stream: Stream) -> None:
    await asyncio.sleep(30)


async def gone_at_once(stream: Stream) -> None:
    stream.close()


async def gone_after_header(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    stream.close()


async def gone_in_mid_payload(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    await stream.write(bytes(1000), 1)
    stream.close()


async def frozen_in_mid_payload(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    await stream.write(bytes(1000), 1)
    await asyncio.sleep(30)


async def sends_a_byte_now_and_then(stream: Stream) -> None:
    """Never for as long as a stall is it silent."""
    await stream.send(header(NUMEL), 1)
    for _ in range(100):
        await stream.write(b"x", 1)
        await asyncio.sleep(0.9 * FAST.stall)


async def sends_all_but_a_few_bytes_at_once(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    await stream.write(bytes(4 * (PART - 10_000)), 1)
    for _ in range(100):
        await asyncio.sleep(0.5 * PHASE)
        await stream.write(b"x", 1)


async def sends_so_that_it_just_looks_fast_enough(stream: Stream) -> None:
    """In each quarter a little more than what is left over the time that is left, and never the last bytes."""
    reading = asyncio.ensure_future(stream.read_into(memoryview(bytearray(8 * NUMEL)), 10))
    await stream.send(header(NUMEL), 1)
    left = size("none", NUMEL)
    for quarter in range(4, 1, -1):
        piece = left // quarter + 1000
        await stream.write(bytes(piece), 1)
        left -= piece
        await asyncio.sleep(0.5 * PHASE)
        await stream.write(b"x", 1)
        await asyncio.sleep(0.5 * PHASE)
    for _ in range(100):
        await stream.write(b"x", 1)
        await asyncio.sleep(0.5 * PHASE)
    reading.cancel()


async def reads_nothing(stream: Stream) -> None:
    await stream.send(header(NUMEL), 1)
    await send_parts(stream, fp32_parts(Vector(torch.randn(NUMEL))), 1)
    await asyncio.sleep(30)


async def gone_before_acknowledgement(stream: Stream) -> None:
    await exchange_payloads(stream)
    stream.close()


async def frozen_before_acknowledgement(stream: Stream) -> None:
    await exchange_payloads(stream)
    await asyncio.sleep(30)


@pytest.mark.parametrize("initiator", [True, False])
@pytest.mark.parametrize(
    ("partner", "seconds"),
    [
        (silent, FAST.stall),
        (gone_at_once, 0.0),
        (gone_after_header, 0.0),
        (gone_in_mid_payload, 0.0),
        (frozen_in_mid_payload, FAST.stall),
        (gone_before_acknowledgement, 0.0),
        (frozen_before_acknowledgement, 4 * PHASE),  # it may have to read what the buffers hold
        (sends_a_byte_now_and_then, PHASE),
        (sends_all_but_a_few_bytes_at_once, 2 * PHASE),
        (sends_so_that_it_just_looks_fast_enough, 4 * PHASE),
        (reads_nothing, 2 * PHASE),  # the second look: before, the buffers took what it did not
    ],
)
def test_a_partner_lost_at_any_stage_is_a_timeout(
    thread: LoopThread, partner: Partner, seconds: float, initiator: bool
) -> None:
    averaged = swap(thread, partner, initiator)
    assert averaged.outcome is Outcome.TIMEOUT
    assert averaged.seconds == took(seconds)


def test_a_partner_on_real_sockets_is_lost_too(real_thread: LoopThread) -> None:
    for partner in (gone_in_mid_payload, frozen_in_mid_payload):
        assert swap(real_thread, partner).outcome is Outcome.TIMEOUT


@pytest.fixture
def uvloop_everywhere() -> Iterator[None]:
    """The program has made uvloop the event loop of its process."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.mark.parametrize("partner", [gone_at_once, gone_after_header, gone_in_mid_payload])
def test_a_program_that_uses_uvloop_loses_a_partner_as_any_other(
    uvloop_everywhere: None, real_thread: LoopThread, partner: Partner
) -> None:
    """A reset was an error of another type there, which ended the training."""
    assert swap(real_thread, partner).outcome is Outcome.TIMEOUT


def test_a_partner_that_does_not_accept_ours_is_not_merged(thread: LoopThread) -> None:
    async def partner(stream: Stream) -> None:
        await exchange_payloads(stream)
        await stream.receive(Acknowledgement, 1)
        await stream.send(Acknowledgement(verdict=Outcome.POISONED, detail="odd"), 1)

    averaged = swap(thread, partner)
    assert (averaged.outcome, averaged.detail) == (Outcome.REFUSED, "the partner refused: poisoned odd")


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\x05hello", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}"])
def test_something_else_than_the_protocol_is_corrupt(thread: LoopThread, garbage: bytes) -> None:
    async def partner(stream: Stream) -> None:
        await stream.write(garbage, 1)
        await asyncio.sleep(5)

    assert swap(thread, partner).outcome is Outcome.CORRUPT


class Moved(Vector):
    """A contribution that has moved by about 1e-3 since the last average."""

    def read_both(self, start: int, out: torch.Tensor, change: torch.Tensor) -> None:
        self.read(start, out)
        change.copy_(1e-3 * torch.randn(out.numel()))


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
def test_a_coded_swap_averages_and_costs_fewer_bytes(thread: LoopThread, codec: CodecName) -> None:
    torch.manual_seed(0)
    base = 0.05 * torch.randn(NUMEL)
    vectors = [base + 1e-3 * torch.randn(NUMEL) for _ in range(2)]
    streams = thread.call(stream_pair(), 5)
    sides = [pair_exchange(thread, NUMEL, codec) for _ in range(2)]
    for result in both(sides, [Moved(it) for it in vectors], streams):
        assert result.outcome is Outcome.MERGED, result.detail
        error = (result.mean - (vectors[0] + vectors[1]) / 2).norm() / vectors[0].norm()
        assert float(error) < {"fp16": 1e-3, "bf16": 5e-3, "int8": 1.5e-3, "int4": 0.02}[codec]
        assert result.bytes_sent <= {"fp16": 2.0, "bf16": 2.0, "int8": 1.03, "int4": 0.52}[codec] * NUMEL + 1000


class SlowAtFirst(Moved):
    """It takes 6 s to read each of its two parts for the first time: before the header, where a codec learns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.reads = 0

    def read_both(self, start: int, out: torch.Tensor, change: torch.Tensor) -> None:
        super().read_both(start, out, change)
        self.reads += 1
        if self.reads <= 2:
            clock.sleep(6.0)


@pytest.fixture
def slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contribution of ``NUMEL`` elements may be read in 15 s."""
    monkeypatch.setattr(transfer_rule, "COPY_RATE", 4 * NUMEL / 15)


def test_a_newcomer_that_reads_its_contribution_for_longer_than_a_stall_is_waited_for(
    thread: LoopThread, slow_machines: None
) -> None:
    """The other one hung up, so the newcomer's codec had learned nothing and read it again in each round: it merged
    with no member of before.
    """
    one, two = [Moved(0.05 + 1e-3 * torch.randn(NUMEL)) for _ in range(2)]
    member, another = [pair_exchange(thread, NUMEL, "int8") for _ in range(2)]

    def merged(side: PairExchange, vector: Contribution, order: int) -> list[float]:
        streams = thread.call(stream_pair(), 5)[::order]
        swapped = both([side, member], [vector, one], streams)
        assert [it.outcome for it in swapped] == [Outcome.MERGED] * 2, swapped
        return [it.seconds for it in swapped]

    assert merged(another, two, 1) == [took(0.0)] * 2
    for order in (1, -1):
        newcomer = pair_exchange(thread, NUMEL, "int8")
        assert merged(newcomer, SlowAtFirst(torch.full((NUMEL,), 0.05)), order) == [took(0.0), took(12.0)]


@pytest.mark.parametrize(
    ("phase_seconds", "away", "seconds"),
    [(100.0, False, 15.0), (4.0, False, 8.0), (100.0, True, LEAVING_SECONDS)],
)
def test_a_partner_without_a_header_costs_no_more_than_to_read_a_contribution_and_half_of_the_limit(
    thread: LoopThread, slow_machines: None, phase_seconds: float, away: bool, seconds: float
) -> None:
    """Who is asked to stop gives it up."""
    stream, _theirs = thread.call(stream_pair(), 5)
    exchange = pair_exchange(thread, NUMEL, "int8")
    exchange.away = lambda: away
    group = Group(0, (Link("B", "b", stream),), phase_seconds=phase_seconds)
    averaged = exchange.average(Moved(torch.randn(NUMEL)), group)
    assert (averaged.outcome, averaged.seconds) == (Outcome.TIMEOUT, took(seconds, more=1.5 if away else 0.02))
    assert averaged.culprits == (() if away else ("B",))


def test_another_codec_is_refused_by_name(thread: LoopThread) -> None:
    async def partner(stream: Stream) -> None:
        await stream.send(header(NUMEL, 0, "int4"), 1)

    averaged = swap(thread, partner)
    assert averaged.outcome is Outcome.REFUSED
    assert averaged.detail == "codec is int4 there and none here"


def test_parts_that_have_arrived_are_judged_although_the_partner_has_closed_the_stream() -> None:
    """A partner that refuses us first closes the stream; the reason that this peer finds itself must not get lost."""

    async def receiving() -> bytes:
        await asyncio.sleep(0.01)
        raise Unusable(Verdict(Outcome.POISONED, detail="far", reason=Reason.FAR))

    async def sending() -> None:
        raise StreamLost("closed")

    with pytest.raises(Unusable):
        run(both_ways(receiving(), sending()))


async def test_a_defect_of_the_sending_side_is_not_hidden_behind_the_time_out_of_the_receiving_side() -> None:
    async def receiving() -> bytes:
        await asyncio.sleep(100.0)
        raise TimeoutError

    async def sending() -> None:
        raise ValueError("a defect")

    began = clock.monotonic()
    with pytest.raises(ValueError, match="a defect"):
        await both_ways(receiving(), sending())
    assert clock.monotonic() - began == took(0.0)
