"""The swap beside the inner steps: parts land one by one, and whatever goes wrong is an outcome."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import xxhash
from torch import Tensor

from peer import clock
from peer.config.schema import CodecName
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.exchange.pair.mailbox import OpenPart, SwapMailbox, overlapped_parts
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.exchange.pair.protocol import LONGEST_STALL_SHARE, PART_STEPS
from peer.exchange.pair.wire import Header
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import PART, Averaged
from peer.rounds.types import Group, Link, Outcome, Reason
from tests.unit.exchange.pair_harness import FAST, PHASE, at_once, header
from tests.unit.virtual import stream_pair, took

NUMEL = 40_000
PACE = 0.02


class Trainee:
    """A peer whose inner steps are sleeps and whose outer step is to take half the difference."""

    def __init__(self, thread: LoopThread, vector: Tensor, codec: CodecName = "none", *, known: bool = True) -> None:
        numel = vector.numel()
        self.vector, self.pace = vector, PACE
        coder, guard = codec_named(codec, numel), Guard()
        if known:  # the other one was met before
            guard.remember("B", b"")
        self.exchange = OverlappedPairExchange(network=thread, numel=numel, codec=coder, settings=FAST, guard=guard)
        self.late: list[int] = []
        self.trained = 1.0  # share of what is sent
        self.open_at_once = 0

    def swap(self, meet: Callable[[], Group], steps: int = 2000) -> Averaged:
        mailbox = self.exchange.start(lambda: replace(meet(), step_seconds=self.pace))
        opened: dict[int, int] = {}
        for step in range(steps):
            result = mailbox.result()
            for index, correction in mailbox.take_corrections():
                start, stop = mailbox.parts[index]
                self.vector[start:stop] += correction
                self.late.append(step - opened[index])
            if result is not None:
                return result
            for index in mailbox.parts_to_open():
                start, stop = mailbox.parts[index]
                own = self.vector[start:stop].clone()
                opened[index] = step
                mailbox.put(index, OpenPart(own, self.trained * own))
            self.open_at_once = max(self.open_at_once, len(mailbox._opened))
            clock.sleep(self.pace)
        raise AssertionError("the swap never ended")


def with_link(stream: Stream, tokens: int = 1, phase_seconds: float = PHASE) -> Callable[[], Group]:
    return lambda: Group(0, (Link("B", "b", stream),), tokens=tokens, phase_seconds=phase_seconds)


def both(
    one: Trainee, two: Trainee, streams: tuple[Stream, Stream], tokens: tuple[int, int] = (1, 1)
) -> tuple[Averaged, Averaged]:
    sides = zip((one, two), streams, tokens, strict=True)
    left, right = at_once(partial(side.swap, with_link(stream, n)) for side, stream, n in sides)
    return left, right


def test_the_parts_cover_the_model_and_are_small_for_a_small_one() -> None:
    for numel in (1, 255, 256, 257, 40_000, 1_000_000, 64 * PART, 200 * PART + 3):
        borders = overlapped_parts(numel)
        assert borders[0][0] == 0 and borders[-1][1] == numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(borders))
        assert all(start % 256 == 0 and stop - start <= PART for start, stop in borders)
        assert len(borders) >= min(40, -(-numel // 256))


@pytest.mark.parametrize(("codec", "off"), [("none", 1e-6), ("fp16", 2e-3), ("int8", 0.06), ("int4", 0.9)])
def test_both_come_to_the_mean_part_by_part(thread: LoopThread, codec: CodecName, off: float) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(NUMEL), torch.randn(NUMEL)
    one, two = Trainee(thread, first.clone(), codec), Trainee(thread, second.clone(), codec)
    left, right = both(one, two, thread.call(stream_pair(), 5))
    assert (left.outcome, right.outcome) == (Outcome.MERGED, Outcome.MERGED), (left.detail, right.detail)
    for it in (one, two):
        assert float((it.vector - (first + second) / 2).abs().quantile(0.99)) <= off
        assert max(it.late) <= 10 and len(it.late) == len(overlapped_parts(NUMEL))
    assert left.distance == pytest.approx(float((first - second).norm() / first.norm()), rel=0.1)
    assert left.partners == ("b",)


def test_a_first_part_that_never_changes_is_no_replay_and_a_whole_swap_again_is(thread: LoopThread) -> None:
    """A parameter that is zero and gets no gradient: each partner was left out from its second swap on."""
    one, two = (Trainee(thread, torch.randn(NUMEL)) for _ in range(2))
    for number in range(3):
        for it in (one, two):
            it.vector[: overlapped_parts(NUMEL)[0][1]] = 0
            it.vector[-1] += number
        sent = two.vector.clone()
        left, right = both(one, two, thread.call(stream_pair(), 5))
        assert (left.outcome, right.outcome) == (Outcome.MERGED, Outcome.MERGED), (left.detail, right.detail)
    two.vector = sent
    left, _ = both(one, two, thread.call(stream_pair(), 5))
    assert (left.outcome, left.reason) == (Outcome.POISONED, Reason.REPLAYED)


def test_over_real_sockets_and_threads_too(real_thread: LoopThread) -> None:
    first, second = torch.randn(NUMEL), torch.randn(NUMEL)
    one, two = Trainee(real_thread, first.clone()), Trainee(real_thread, second.clone())
    left, right = both(one, two, real_thread.call(stream_pair(), 5))
    assert (left.outcome, right.outcome) == (Outcome.MERGED, Outcome.MERGED), (left.detail, right.detail)
    torch.testing.assert_close(one.vector, (first + second) / 2)


def test_only_a_few_parts_are_open_before_the_first_have_landed(thread: LoopThread) -> None:
    """What a part is late by must not grow with the model; and a slow partner must not make us open everything."""
    one, two = Trainee(thread, torch.randn(NUMEL)), Trainee(thread, torch.randn(NUMEL))
    two.pace = 5 * PACE
    left, _ = both(one, two, thread.call(stream_pair(), 5))
    assert left.outcome is Outcome.MERGED, left.detail
    assert one.open_at_once <= len(overlapped_parts(NUMEL)) // 2


def test_a_partner_that_trains_slowly_is_not_taken_for_dead(thread: LoopThread) -> None:
    one, two = Trainee(thread, torch.randn(600)), Trainee(thread, torch.randn(600))
    two.pace = 1.3 * FAST.stall
    left, right = both(one, two, thread.call(stream_pair(), 5))
    assert left.outcome is right.outcome is Outcome.MERGED, (left.detail, right.detail)


def test_nobody_to_meet_is_alone(thread: LoopThread) -> None:
    one = Trainee(thread, torch.randn(10))
    assert one.swap(lambda: Group(0)).outcome is Outcome.ALONE


def test_a_failure_of_the_network_thread_reaches_the_training_thread(thread: LoopThread) -> None:
    def fail() -> Group:
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        Trainee(thread, torch.randn(10)).swap(fail)


# -- a partner that is played by hand


async def greet(stream: Stream, numel: int = NUMEL, pace: float = PACE) -> None:
    await stream.send(header(numel, pace=pace), 1)
    await stream.receive(Header, 1)


def data(index: int) -> Tensor:
    start, stop = overlapped_parts(NUMEL)[index]
    return torch.randn(stop - start)


async def send_part(stream: Stream, part: Tensor) -> None:
    data = part.numpy().tobytes()
    await stream.write(data + xxhash.xxh3_128_digest(data), 1)


async def send_parts(stream: Stream, count: int) -> None:
    for index in range(count):
        await send_part(stream, data(index))


def against(
    thread: LoopThread, partner: Callable[[Stream], Awaitable[None]], pace: float = PACE, one: Trainee | None = None
) -> tuple[Averaged, Trainee, Tensor]:
    ours, theirs = thread.call(stream_pair(), 5)
    playing = asyncio.run_coroutine_threadsafe(partner(theirs), thread.loop)  # type: ignore[arg-type]
    one = one or Trainee(thread, torch.randn(NUMEL))
    one.pace = pace
    before = one.vector.clone()
    result = one.swap(with_link(ours, phase_seconds=max(PHASE, 20 * pace)))
    playing.cancel()
    return result, one, before


def changed(one: Trainee, before: Tensor) -> list[int]:
    return [
        index
        for index, (start, stop) in enumerate(overlapped_parts(NUMEL))
        if not torch.equal(one.vector[start:stop], before[start:stop])
    ]


def test_a_partner_that_dies_in_the_middle_leaves_whole_parts(thread: LoopThread) -> None:
    async def dies(stream: Stream) -> None:
        await greet(stream)
        await send_parts(stream, 3)
        await stream.write(data(3).numpy().tobytes()[:500], 1)
        await asyncio.sleep(0.5)
        stream.close()

    result, one, before = against(thread, dies)
    assert result.outcome is Outcome.TIMEOUT and "after 3 of" in result.detail
    assert changed(one, before) == [0, 1, 2]


@pytest.mark.parametrize(
    ("own", "theirs", "seconds"),
    [
        (PACE, PACE, FAST.stall),
        (0.2, 0.3, PART_STEPS * 0.5),  # a slow partner sends a part only now and then
        (PACE, 1e5, LONGEST_STALL_SHARE * 4 * PHASE),  # it says so, and no more than that is believed
    ],
)
def test_a_partner_that_freezes_costs_a_stall(thread: LoopThread, own: float, theirs: float, seconds: float) -> None:
    async def freezes(stream: Stream) -> None:
        await greet(stream, pace=theirs)
        await send_parts(stream, 1)
        await asyncio.sleep(60)

    result, one, before = against(thread, freezes, own)
    assert result.outcome is Outcome.TIMEOUT
    assert changed(one, before) == [0]
    assert result.seconds == took(seconds, more=2 * own)  # its first part is used between two steps


def test_a_partner_that_sends_a_part_now_and_then_costs_the_deadline(thread: LoopThread) -> None:
    async def dawdles(stream: Stream) -> None:
        await greet(stream)
        for _ in range(60):
            await asyncio.sleep(0.9 * FAST.stall)
            await send_parts(stream, 1)

    result, _, _ = against(thread, dawdles)
    assert result.outcome is Outcome.TIMEOUT, result
    assert result.seconds == took(PHASE)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisonous_part_is_not_used(thread: LoopThread, poison: float) -> None:
    async def poisons(stream: Stream) -> None:
        await greet(stream)
        await send_parts(stream, 2)
        await send_part(stream, torch.full_like(data(2), poison))
        await asyncio.sleep(60)

    result, one, before = against(thread, poisons)
    assert result.outcome is Outcome.POISONED
    assert changed(one, before) == [0, 1]
    assert one.vector.isfinite().all()


@pytest.mark.parametrize(("factor", "moved"), [(2.9, 0.95), (3.1, 1.0), (1e9, 1.0), (-0.9, 0.95), (-1.1, 1.0)])
def test_a_part_of_a_known_partner_changes_no_more_than_the_inner_steps(
    thread: LoopThread, factor: float, moved: float
) -> None:
    """However large it is: it is used before the rest has come."""
    one, stop = Trainee(thread, torch.randn(NUMEL)), overlapped_parts(NUMEL)[0][1]
    loud = factor * one.vector[:stop]

    async def louder(stream: Stream) -> None:
        await greet(stream)
        await send_part(stream, loud)
        await asyncio.sleep(60)

    result, one, before = against(thread, louder, one=one)
    assert result.outcome is Outcome.TIMEOUT, result.detail
    assert changed(one, before) == [0]
    length = (one.vector - before)[:stop].norm() / (one.trained * before[:stop]).norm()
    assert float(length) == pytest.approx(moved, rel=1e-3)


def test_a_header_of_another_size_is_refused(thread: LoopThread) -> None:
    async def stranger(stream: Stream) -> None:
        await greet(stream, NUMEL + 1)

    result, one, before = against(thread, stranger)
    assert result.outcome is Outcome.REFUSED and "payload_bytes" in result.detail
    assert changed(one, before) == []


def test_a_codec_that_is_not_the_runs_is_refused(thread: LoopThread) -> None:
    one, two = Trainee(thread, torch.randn(NUMEL), "fp16"), Trainee(thread, torch.randn(NUMEL), "bf16")
    left, right = both(one, two, thread.call(stream_pair(), 5))
    assert left.outcome is Outcome.REFUSED and "codec is bf16 there" in left.detail
    assert right.outcome in (Outcome.REFUSED, Outcome.TIMEOUT)


def test_the_mailbox_forgets_parts_that_were_sent_and_have_landed(thread: LoopThread) -> None:
    mailbox = SwapMailbox(NUMEL, thread.loop)
    mailbox.start(lambda: None)
    for index in mailbox.parts_to_open():
        mailbox.put(index, OpenPart(torch.zeros(1), torch.zeros(1)))
    mailbox.add_correction(0, torch.zeros(1))
    assert 0 in mailbox._opened  # not sent yet
    mailbox.count_sent()
    assert 0 not in mailbox._opened and 1 in mailbox._opened


def test_a_swap_begins_at_the_rate_of_the_last_one(thread: LoopThread) -> None:
    """With two parts, which double with each inner step, five steps were lost at a rate of 47 a step."""
    first = SwapMailbox(1000 * PART, thread.loop)
    first.start(lambda: None)
    assert len(first.parts_to_open()) == 2
    first.received_parts = 20
    first.parts_to_open()
    assert first.opening_pace.landing == 10
    second = SwapMailbox(1000 * PART, thread.loop, usual=first.opening_pace.landing)
    second.start(lambda: None)
    assert len(second.parts_to_open()) == 21
    assert len(second.parts_to_open()) == 21  # none of them has landed: they may be on their way for longer


@pytest.mark.parametrize(("parts", "most"), [(64, 64), (400, 64), (4096, 512)])
def test_no_more_of_a_large_model_is_open_than_an_eighth(thread: LoopThread, parts: int, most: int) -> None:
    """Also when no inner steps run, and when the swap has ended: an open part takes twice its memory."""
    mailbox, part = SwapMailbox(parts * PART, thread.loop), OpenPart(torch.zeros(1), torch.zeros(1))
    mailbox.start(lambda: None)
    wanted = mailbox.parts_to_open(idle=True)
    assert wanted == range(most)
    for index in wanted:
        mailbox.put(index, part)
    assert not mailbox.parts_to_open(idle=True)
    mailbox.count_sent()
    assert not mailbox.parts_to_open(idle=True)  # the partner's has not come
    mailbox.add_correction(0, torch.zeros(1))
    assert mailbox.parts_to_open(idle=True) == range(most, min(most + 1, parts))
    mailbox.finish(Averaged(torch.empty(0), Outcome.ALONE))
    while wanted := mailbox.parts_to_open():
        assert len(wanted) <= most
        for index in wanted:
            mailbox.put(index, part)
    assert not mailbox.parts_left() and len(mailbox._opened) == most - 1


def test_a_swap_can_be_broken_off(thread: LoopThread) -> None:
    async def silent(stream: Stream) -> None:
        await greet(stream)
        await asyncio.sleep(60)

    ours, theirs = thread.call(stream_pair(), 5)
    playing = asyncio.run_coroutine_threadsafe(silent(theirs), thread.loop)
    one = Trainee(thread, torch.randn(NUMEL))
    mailbox = one.exchange.start(lambda: replace(with_link(ours)(), step_seconds=PACE))
    while not mailbox.parts_to_open():
        mailbox.wait(5)
    began = clock.monotonic()
    mailbox.cancel()
    while (result := mailbox.result()) is None:
        mailbox.wait(5)
    assert (result.outcome, result.culprits) == (Outcome.TIMEOUT, ())
    assert clock.monotonic() - began == took(0)
    playing.cancel()


def test_a_peer_that_opens_no_parts_ends_its_swap_after_a_stall(thread: LoopThread) -> None:
    """Its training thread does something else: the partner is not kept until the deadline."""

    async def waits(stream: Stream) -> None:
        await greet(stream)
        await send_parts(stream, 1)
        await asyncio.sleep(60)

    ours, theirs = thread.call(stream_pair(), 5)
    thread.spawn(waits(theirs))
    mailbox = Trainee(thread, torch.randn(NUMEL)).exchange.start(lambda: replace(with_link(ours)(), step_seconds=PACE))
    while (result := mailbox.result()) is None:
        mailbox.wait(5)
    assert result.outcome is Outcome.TIMEOUT
    assert result.seconds == took(FAST.stall)


def test_a_poisonous_part_teaches_the_codec_nothing(thread: LoopThread) -> None:
    """fp16 is understood from everybody, so it may carry NaN; the next header must still be a header."""

    async def poisons(stream: Stream) -> None:
        await stream.send(header(NUMEL, 0, "fp16", pace=PACE), 1)
        await stream.receive(Header, 1)
        for value in (0.0, float("nan")):
            await send_part(stream, torch.full_like(data(0), value, dtype=torch.float16))
        await asyncio.sleep(60)

    result, one, _ = against(thread, poisons, one=Trainee(thread, torch.zeros(NUMEL), "int4"))
    assert result.outcome is Outcome.POISONED
    codec = one.exchange.codec
    codec.begin()
    header(NUMEL, 1, codec.sends, expects=codec.expects)


def test_parts_are_forgotten_while_others_are_opened(real_thread: LoopThread) -> None:
    """Both threads change the mailbox at the same time."""
    for _ in range(20):
        mailbox = SwapMailbox(64 * 256, real_thread.loop)
        mailbox.start(lambda: None)
        ready = threading.Event()

        def land(mailbox: SwapMailbox = mailbox, ready: threading.Event = ready) -> None:
            ready.wait(5)
            for index in range(64):
                while index not in mailbox._opened:
                    time.sleep(0)
                mailbox.add_correction(index, torch.zeros(1))
                mailbox.count_sent()

        landing = threading.Thread(target=land)
        landing.start()
        ready.set()
        for index in range(64):
            mailbox.put(index, OpenPart(torch.zeros(1), torch.zeros(1)))
        landing.join(10)
        assert not landing.is_alive() and mailbox._opened == {}


def test_of_who_is_not_known_nothing_is_used_before_it_can_be_told_from_a_stranger(thread: LoopThread) -> None:
    drawn = torch.Generator().manual_seed(0)
    one, two = (Trainee(thread, torch.randn(NUMEL, generator=drawn), known=False) for _ in "ab")
    for trainee in (one, two):
        trainee.trained = 0.01
    for _ in range(2):
        before = one.vector.clone(), two.vector.clone()
        averaged, _ = both(one, two, thread.call(stream_pair(), 5))
        assert averaged.outcome in (Outcome.POISONED, Outcome.TIMEOUT) and averaged.strange, averaged
        assert torch.equal(one.vector, before[0]) and torch.equal(two.vector, before[1])

    two.vector = one.vector + 0.01 * torch.randn(NUMEL, generator=drawn)  # it has taken the weights of others
    middle = (one.vector + two.vector) / 2
    averaged, _ = both(one, two, thread.call(stream_pair(), 5))
    assert averaged.outcome is Outcome.MERGED and not averaged.strange
    torch.testing.assert_close(one.vector, middle)


def test_a_part_is_learned_before_it_can_be_sent_or_received(thread: LoopThread) -> None:
    """Else the partner's part may be decoded with a reach that is not known yet, and learning then forgets it."""
    seen: list[tuple[int, bool]] = []
    mailbox = SwapMailbox(NUMEL, thread.loop, lambda start, change: seen.append((start, 0 in mailbox._opened)))
    mailbox.put(0, OpenPart(torch.ones(3), torch.ones(3)))
    assert seen == [(0, False)] and 0 in mailbox._opened


def test_parts_that_are_opened_together_wake_the_network_once_and_are_taken_together() -> None:
    calls: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_soon_threadsafe=calls.append)
    few, large = SwapMailbox(NUMEL, loop), SwapMailbox(64 * PART, loop)  # type: ignore[arg-type]

    def put(mailbox: SwapMailbox, *indices: int) -> list[Tensor]:
        parts = [torch.zeros(stop - start) for start, stop in (mailbox.parts[index] for index in indices)]
        for index, part in zip(indices, parts, strict=True):
            mailbox.put(index, OpenPart(part, part))
        return parts

    opened = put(few, 0, 1, 2)
    assert len(calls) == 1
    assert [it.own for it in asyncio.run(few.opened_from(1, 1.0))] == opened[1:]
    calls[0]()  # the network thread has looked: the next part needs a call of its own
    put(few, 3)
    assert len(calls) == 2
    put(large, 0, 1)
    assert len(asyncio.run(large.opened_from(0, 1.0))) == 1, "parts of 1 MiB are encoded one by one"
