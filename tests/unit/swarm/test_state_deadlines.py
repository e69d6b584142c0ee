"""A donor and a newcomer that are left alone at any stage of a transfer know it in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from peer import clock
from peer.exchange.codec import size
from peer.p2p.deadline import TooSlow
from peer.p2p.event_loop import LoopThread
from peer.p2p.payload import fp32_parts, send_parts
from peer.p2p.stream import BadMessage, Stream
from peer.rounds.backoff import Proven
from peer.rounds.contribution import PART, Vector
from peer.rounds.state import NO_ROUNDS, Lineage, State
from peer.rounds.transfer_rule import CATCH_UP_LEAST, LONGEST_REPEAT_PAUSE, answer_limit
from peer.rounds.types import Seat
from peer.swarm.presence import Presence
from peer.swarm.state_transfer.donor import (
    CLIENTS,
    STATE_ANSWER,
    STATE_LEAST,
    STATE_STALL,
    STATE_TIMEOUT,
    Donor,
    DonorFull,
    StateHeader,
    StateReceived,
    StateRequest,
)
from peer.swarm.state_transfer.download import DonorBehind, DonorBusy, PartialState, download
from peer.swarm.state_transfer.join import ASK_ALL_PAUSE, SHORT_PATIENCE, take_from
from tests.unit.swarm.test_state_transfer import come
from tests.unit.virtual import RATE, stream_pair, took

PARTS = 5
NUMEL = PARTS * PART
Side = Callable[[Stream], Awaitable[None]]


async def never(stream: Stream) -> None:
    await asyncio.sleep(1e6)


# -- a newcomer


class OneDonor:
    """A node that reaches one donor, which ``plays``."""

    def __init__(self, plays: Side) -> None:
        self._plays = plays

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        ours, theirs = await stream_pair()
        self._playing = asyncio.ensure_future(self._plays(theirs))
        return ours


async def begin(stream: Stream) -> None:
    """The donor's side until its first part has gone."""
    await stream.receive(StateRequest, 1)
    header = StateHeader(step=1, round=1, phase_steps_done=0, lineage=NO_ROUNDS, vectors=1, numel=NUMEL, first=0)
    await stream.send(header, 1)
    await send_parts(stream, fp32_parts(Vector(torch.randn(PART))), 1)


async def dribble(stream: Stream, count: int) -> None:
    """A byte every five seconds."""
    for _ in range(count):
        await stream.write(b"x", 1)
        await asyncio.sleep(5)


async def freezes(stream: Stream) -> None:
    await begin(stream)
    await never(stream)


async def dribbles(stream: Stream) -> None:
    await begin(stream)
    await dribble(stream, 10_000)


async def sends_a_part_in_two_minutes(stream: Stream) -> None:
    await begin(stream)
    part = torch.randn(PART).numpy().tobytes()
    for start in range(24):
        await stream.write(part[start : start + 1], 1)
        await asyncio.sleep(5)
    await stream.write(part[24:], 1)
    await stream.write(xxhash.xxh3_128_digest(part), 1)
    await dribble(stream, 10_000)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"round": 11}, False),
        ({"phase_steps_done": 10**12}, False),  # it counts as steps: the run would be over
        ({"lineage": Lineage("ff", 2**53)}, False),
    ],
)
def test_a_state_of_more_than_there_can_be_is_not_taken(
    thread: LoopThread, changes: dict[str, Any], fits: bool
) -> None:
    async def says(stream: Stream) -> None:
        await stream.receive(StateRequest, 1)
        header = StateHeader(step=900, round=9, phase_steps_done=50, lineage=NO_ROUNDS, vectors=1, numel=300, first=0)
        await stream.send(header.model_copy(update=changes), 1)
        await send_parts(stream, fp32_parts(Vector(torch.randn(300))), 1)
        await never(stream)

    newcomer = PartialState([torch.zeros(300)])
    work = download(OneDonor(says), Seat("a", "a"), newcomer, most=(10.0, 1000.0))  # type: ignore[arg-type]
    if fits:
        assert thread.call(work, 60).phase_steps_done == 50
    else:
        with pytest.raises(BadMessage, match="more than since its record"):
            thread.call(work, 60)


@pytest.mark.parametrize(
    ("plays", "patience", "said", "seconds", "have"),
    [
        (never, STATE_LEAST, "", STATE_TIMEOUT, 0),
        (freezes, STATE_LEAST, "", STATE_STALL, 1),
        # others are asked; its first part was fast
        (dribbles, SHORT_PATIENCE, "too slow: receiving at", 2 * SHORT_PATIENCE / 4, 1),
        (sends_a_part_in_two_minutes, STATE_LEAST, "too slow: receiving at", 2 * STATE_LEAST / 4, 2),
    ],
)
def test_a_newcomer_leaves_its_donor(
    thread: LoopThread, plays: Side, patience: float, said: str, seconds: float, have: int
) -> None:
    newcomer = PartialState([torch.zeros(NUMEL)])
    began = clock.monotonic()
    with pytest.raises(TimeoutError, match=said or "^$") as raised:
        thread.call(download(OneDonor(plays), Seat("Qm", "donor"), newcomer, 0, patience), 1e5)  # type: ignore[arg-type]
    assert clock.monotonic() - began == took(seconds)
    assert isinstance(raised.value, TooSlow) == bool(said)
    assert newcomer.have == have


async def sends_all_in_half_a_minute(stream: Stream) -> None:
    await begin(stream)
    for _ in range(1, PARTS):
        await asyncio.sleep(8.0)
        await send_parts(stream, fp32_parts(Vector(torch.randn(PART))), 1)
    await stream.receive(StateReceived, 1)
    stream.close()


async def is_busy(stream: Stream) -> None:
    await stream.receive(StateRequest, 1)
    await stream.send_last(DonorFull(), 1)


@pytest.mark.parametrize(
    ("plays", "seconds", "gives"),
    [
        ([dribbles], CATCH_UP_LEAST / 4, False),  # all of it then, as at its least rate it may take 100 s
        ([is_busy] * 20 + [dribbles], 20 * ASK_ALL_PAUSE + (CATCH_UP_LEAST - 20 * ASK_ALL_PAUSE) / 4, False),
        ([sends_all_in_half_a_minute], 32.0, True),
    ],
)
def test_a_state_that_cannot_come_while_the_group_waits_is_given_up_at_a_quarter(
    thread: LoopThread, plays: Sequence[Side], seconds: float, gives: bool
) -> None:
    """All members wait for who takes it."""
    donors = map(OneDonor, plays)

    def open_to_member(*asked: Any) -> Awaitable[Stream]:
        return next(donors).open_to_member(*asked)

    context: Any = SimpleNamespace(node=SimpleNamespace(call=thread.call, open_to_member=open_to_member), away=False)
    began, most = clock.monotonic(), (10.0, 1000.0)
    state = take_from(context, Seat("Qm", "donor"), [torch.zeros(NUMEL)], CATCH_UP_LEAST, most)
    assert clock.monotonic() - began == took(seconds, more=0.3) and (state is not None) == gives


def test_a_member_that_has_not_ended_the_round_sends_no_part(thread: LoopThread) -> None:
    """Who asks it again and again would take a whole state in vain each time."""
    node = SimpleNamespace(call=thread.call, open_to_member=OneDonor(begin).open_to_member)
    context: Any = SimpleNamespace(node=node, away=False)
    room = torch.zeros(NUMEL)
    with pytest.raises(DonorBehind):
        take_from(context, Seat("Qm", "donor"), [room], CATCH_UP_LEAST, (10.0, 1000.0), 2)
    assert not room.any()


def test_a_large_state_may_take_its_donor_longer_to_copy(thread: LoopThread) -> None:
    """Of 10 GB, on the meta device."""
    newcomer = PartialState([torch.empty(2_500_000_000, device="meta")])
    began = clock.monotonic()
    with pytest.raises(TimeoutError):
        thread.call(download(OneDonor(never), Seat("Qm", "donor"), newcomer), 1e5)  # type: ignore[arg-type]
    assert clock.monotonic() - began == took(100.0)


@pytest.mark.parametrize("most", [(0, 10), (10, 0)])
def test_a_state_of_a_later_round_or_step_than_can_be_is_not_received(
    most: tuple[int, int], thread: LoopThread
) -> None:
    partial = PartialState([torch.zeros(NUMEL)])
    work = download(OneDonor(begin), Seat(peer_id="Qm", name="it"), partial, most=most)  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="more than since its record"):
        thread.call(work, 60.0)
    assert partial.have == 0


# -- a donor


async def takes_nothing(stream: Stream) -> None:
    await stream.send(StateRequest(), 1)
    await never(stream)


async def takes_all_and_says_nothing(stream: Stream) -> None:
    await stream.send(StateRequest(), 1)
    await stream.receive(STATE_ANSWER, 1)
    await stream.read_into(memoryview(bytearray(size("none", NUMEL) + PARTS * 16)), 1)
    await never(stream)


async def takes_all_that_comes(stream: Stream) -> None:
    await stream.send(StateRequest(), 1)
    await stream.read_into(memoryview(bytearray(100 * 4 * PART)), 100)


@pytest.mark.parametrize(
    ("plays", "parts", "seconds"),
    [
        (never, PARTS, STATE_TIMEOUT),
        (takes_nothing, PARTS, answer_limit(STATE_STALL, 4 * PART)),
        (takes_all_and_says_nothing, PARTS, answer_limit(STATE_STALL, PARTS * 4 * PART)),
        (takes_all_that_comes, 64, STATE_LEAST / 4),
    ],
)
async def test_a_donor_leaves_its_newcomer_and_has_room_for_another(
    thread: LoopThread, plays: Side, parts: int, seconds: float
) -> None:
    serving = Donor(lambda: State(1, 1, [torch.randn(parts * PART)]), Proven())

    began = clock.monotonic()
    ours, theirs = await stream_pair(rate=RATE if parts == PARTS else 40_000)  # 0.32 Mbit/s
    thread.background(plays(theirs))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await serving.serve(ours)
    assert clock.monotonic() - began == took(seconds, more=0.1)  # of five parts
    assert not serving._clients


@pytest.mark.parametrize(
    ("round", "away", "seconds"),
    [
        (1, False, 1.5 * LONGEST_REPEAT_PAUSE),  # it is asked again within LONGEST_REPEAT_PAUSE
        (2, False, 0.0),
        (1, True, 0.0),
    ],
)
def test_who_was_asked_before_it_had_the_last_round_stays_until_it_is_asked_again(
    thread: LoopThread, round: int, away: bool, seconds: float
) -> None:
    """It left a second after that round, and the member that had lost it had no weights of the group."""
    serving = Donor(lambda: State(round, round, [torch.randn(NUMEL)]), Proven())
    work = download(OneDonor(serving.serve), Seat("Qm", "donor"), PartialState([torch.zeros(NUMEL)]), 2)  # type: ignore[arg-type]
    with nullcontext() if round == 2 else pytest.raises(DonorBehind):
        thread.call(work, 60)
    clock.sleep(0.1)  # until the donor has noticed
    assert stayed(serving, away=away) == took(seconds - 0.1 if seconds else 0.0, more=0.2)


@pytest.mark.parametrize(
    ("pause", "seconds"),
    [
        (8.0, 1.5 * LONGEST_REPEAT_PAUSE),  # as one does that repeats its question, and then asks each second
        (20.0, 0.0),  # who has used up its requests and goes on asking keeps nobody from leaving
    ],
)
def test_who_was_asked_too_often_stays_for_who_is_still_awaited(
    thread: LoopThread, pause: float, seconds: float
) -> None:
    """It was asked each second, said that it was full, and left: the fifth question counted for nothing."""
    serving = Donor(lambda: State(1, 1, [torch.randn(NUMEL)]), Proven())

    def ask() -> None:
        work = download(OneDonor(serving.serve), Seat("Qm", "donor"), PartialState([torch.zeros(NUMEL)]), 2)  # type: ignore[arg-type]
        thread.call(work, 60)

    for after in (0.0, 1.0, 2.0, 4.0):
        clock.sleep(after)
        with pytest.raises(DonorBehind):
            ask()
    clock.sleep(pause)
    with pytest.raises(DonorBusy):
        ask()
    clock.sleep(0.1)
    assert stayed(serving) == took(seconds - 0.1 if seconds else 0.0, more=0.2)


def test_who_has_served_two_stays_for_the_third(thread: LoopThread) -> None:
    """Three had lost the last round, and it gave its state to two."""
    serving = Donor(lambda: State(2, 2, [torch.randn(PART)]), Proven())

    async def scene() -> None:
        newcomers = [await come(serving, f"newcomer {number}") for number in range(CLIENTS + 1)]
        assert [isinstance(answer, DonorFull) for *_, answer in newcomers] == [False] * CLIENTS + [True]
        for stream, *_ in newcomers[:CLIENTS]:
            await stream.read_into(memoryview(bytearray(size("none", PART) + 16)), 1)
            await stream.send(StateReceived(), 1)
            await stream.until_closed(1)

    thread.call(scene(), 60)
    assert not serving._clients
    assert stayed(serving) == took(1.5 * LONGEST_REPEAT_PAUSE, more=0.2)


@pytest.mark.parametrize(
    ("takes", "rate", "seconds"),
    [
        (takes_nothing, RATE, answer_limit(STATE_STALL, 4 * PART) + 1.5 * LONGEST_REPEAT_PAUSE),
        (takes_all_that_comes, 40_000, CATCH_UP_LEAST + LONGEST_REPEAT_PAUSE),
    ],
)
def test_who_leaves_stays_until_its_state_is_given_but_not_for_ever(
    thread: LoopThread, takes: Side, rate: float, seconds: float
) -> None:
    """It left in the middle of a transfer."""
    serving = Donor(lambda: State(1, 1, [torch.randn(64 * PART)]), Proven())

    async def serve() -> None:
        ours, theirs = await stream_pair(rate=rate)
        thread.background(takes(theirs))  # type: ignore[arg-type]
        thread.background(serving.serve(ours))

    thread.call(serve(), 60)
    clock.sleep(0.1)
    assert stayed(serving) == took(seconds - 0.1, more=0.5)


def stayed(donor: Donor, *, away: bool = False) -> float:
    """Seconds before a peer leaves."""
    boundary = SimpleNamespace(progress=SimpleNamespace(phase_seconds=1.0))
    presence: Any = SimpleNamespace(_donor=donor, _context=SimpleNamespace(boundary=boundary, away=away))
    began = clock.monotonic()
    Presence.stay(presence)
    return clock.monotonic() - began


async def test_a_donor_that_is_full_says_so_at_once_and_waits_for_no_answer(thread: LoopThread) -> None:
    serving = Donor(lambda: State(1, 1, [torch.randn(NUMEL)]), Proven())
    for number in range(CLIENTS):
        ours, theirs = await stream_pair()
        ours.remote = f"newcomer {number}"
        thread.background(serving.serve(ours))
        thread.background(takes_nothing(theirs))
    await asyncio.sleep(1.0)
    ours, theirs = await stream_pair()
    serve = asyncio.ensure_future(serving.serve(ours))
    began = clock.monotonic()
    await theirs.send(StateRequest(), 1)
    assert isinstance(await theirs.receive(STATE_ANSWER, 1), DonorFull)
    assert clock.monotonic() - began == took(0)
    await serve
    assert clock.monotonic() - began == took(STATE_TIMEOUT)
