"""The group's average: the same bits for everyone or for nobody, whatever one member does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.config.schema import ExchangeConfig
from peer.exchange.codec import pack, unpack
from peer.exchange.group import all_gather, all_reduce, flow_control
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.deadlines import RoundDeadlines
from peer.exchange.group.flow_control import FlowControlledStream, FrameKind
from peer.exchange.group.rounding import Rounding, Slice
from peer.exchange.group.streams import GroupStreams
from peer.exchange.group.wire import GroupFailure, GroupVerdict, MemberReport
from peer.p2p.payload import Channel
from peer.rounds.contribution import PART, Averaged, Readable, SparseContribution, Vector, mean_of_senders
from peer.rounds.types import Group, Outcome
from tests.simulated.checks.ledger import group_mean
from tests.unit.exchange.group.harness import many
from tests.unit.exchange.pair_harness import FAST
from tests.unit.virtual import took


def vectors(count: int, numel: int) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def contributions(tensors: Sequence[Tensor]) -> list[Vector]:
    return [Vector(tensor) for tensor in tensors]


def sparse(seed: int, numel: int = 600, chunk: int = 100, keep: int = 7) -> SparseContribution:
    noise = np.random.default_rng(seed)
    bases = np.repeat(np.arange(0, numel, chunk), keep)
    places = np.concatenate([noise.choice(chunk, keep, replace=False) for _ in range(numel // chunk)])
    values = torch.from_numpy(noise.normal(size=len(places)).astype(np.float16)).float()
    return SparseContribution(numel, torch.from_numpy(bases), torch.from_numpy(bases + places), values)


def outcomes(results: Sequence[Averaged]) -> list[Outcome]:
    return [it.outcome for it in results]


def test_who_is_asked_to_stop_leaves_a_round_that_takes_long_and_says_that_it_is_itself() -> None:
    """The others repeat the round without it."""

    async def takes_long(*_: Any) -> None:
        await asyncio.sleep(600)

    with many(3, 1000, settings=ExchangeConfig(codec="none", stall=60.0)) as group:
        group.exchanges[1].away = lambda: True
        group.exchanges[1]._combine = takes_long  # type: ignore[method-assign]
        for it in group.average(contributions(vectors(3, 1000))):
            assert (it.outcome, it.culprits, it.detail) == (Outcome.TIMEOUT, ("b",), "asked to stop")
            assert it.seconds == took(10, more=3)


@pytest.mark.parametrize(("count", "numel"), [(2, 5), (3, 2), (4, 1000), (5, 3 * PART + 17)])
def test_all_get_the_same_bits_of_the_mean(count: int, numel: int) -> None:
    tensors = vectors(count, numel)
    kept = [tensor.clone() for tensor in tensors]
    with many(count, numel) as group:
        for _ in range(2):
            results = group.average(contributions(tensors))
            assert outcomes(results) == [Outcome.MERGED] * count, [it.detail for it in results]
            for it in results:
                assert torch.equal(it.mean, results[0].mean)
                assert it.digest == results[0].digest != ""
                assert len(it.partners) == count - 1
            torch.testing.assert_close(results[0].mean, group_mean(tensors), rtol=1e-5, atol=1e-5)
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, before)


def test_over_real_sockets_and_threads_too() -> None:
    tensors = vectors(3, 1000)
    with many(3, 1000, real=True) as group:  # asyncio's transports, threads and clock
        results = group.average(contributions(tensors))
        assert outcomes(results) == [Outcome.MERGED] * 3, [it.detail for it in results]
        torch.testing.assert_close(results[0].mean, torch.stack(tensors).mean(0), rtol=1e-5, atol=1e-5)
        failed = group.average(contributions(tensors), silent=[1])
        assert set(outcomes(failed)) == {Outcome.TIMEOUT}


class NotOnTheLoop(Vector):
    """Elements below ``stop`` may not be read in the thread of an event loop."""

    def __init__(self, tensor: Tensor, stop: int) -> None:
        super().__init__(tensor)
        self._stop = stop

    def read(self, start: int, out: Tensor) -> None:
        if start < self._stop:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
        super().read(start, out)


def test_a_member_copies_its_own_slice_beside_the_network_thread() -> None:
    """All its streams stood still meanwhile, 19 s of a large model, and the others took it for gone."""
    tensors = vectors(2, 1000)
    with many(2, 1000, real=True) as group:
        results = group.average([NotOnTheLoop(tensors[0], stop=500), Vector(tensors[1])])
    assert outcomes(results) == [Outcome.MERGED] * 2, [it.detail for it in results]


@pytest.mark.parametrize("sparsely", [False, True])
def test_eight_members_with_two_turns_to_send_wait_for_nobody_in_a_circle(
    sparsely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for the tables of all read nothing from those that had sent theirs: nobody had a turn any more."""
    monkeypatch.setattr(flow_control, "IN_FLIGHT", 0)
    own: list[Any] = [sparse(seed) for seed in range(8)] if sparsely else contributions(vectors(8, 2000))
    with many(8, own[0].values.numel() if sparsely else 2000, 600 if sparsely else None) as group:
        assert [it.outcome for it in group.average(own)] == [Outcome.MERGED] * 8


def test_each_member_sends_no_more_than_the_formula_says() -> None:
    count, numel = 4, 100_000
    with many(count, numel) as group:
        for it in group.average(contributions(vectors(count, numel))):
            shown = (count - 1) * (296 * count + 132)
            assert 0 <= it.bytes_sent - 4 * numel * 2 * (count - 1) / count - shown <= 0.002 * it.bytes_sent
            assert abs(it.bytes_received - it.bytes_sent) < 2000


def test_alone_and_lost_are_ones_own_contribution() -> None:
    (own,) = vectors(1, 50)
    with many(2, 50) as group:
        alone = group.exchanges[0].average(Vector(own), Group(0))
        assert (alone.outcome, torch.equal(alone.mean, own)) == (Outcome.ALONE, True)
        lost = group.exchanges[0].average(Vector(own), Group(0, lost="peer-b did not come"))
        assert (lost.outcome, lost.detail, lost.digest) == (Outcome.TIMEOUT, "peer-b did not come", "")
        assert alone.digest


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("place", [0, 2])
def test_poison_is_used_by_nobody_and_the_culprit_is_named(poison: float, place: int) -> None:
    tensors = vectors(4, 1000)
    tensors[place][:] *= poison
    with many(4, 1000) as group:
        results = group.average(contributions(tensors))
    assert set(outcomes(results)) == {Outcome.POISONED}, [it.detail for it in results]
    for number, it in enumerate(results):
        assert it.culprits[0] == "abcd"[place], it.detail
        assert math.isfinite(poison) or it.detail.endswith("is not finite")
        assert torch.equal(torch.nan_to_num(it.mean), torch.nan_to_num(tensors[number])), (
            "its own, and nothing of others"
        )


def seconds(results: Sequence[Averaged]) -> list[float]:
    return [it.seconds for it in results]


@pytest.mark.parametrize(
    ("silent", "stalls"),
    [
        (0, [2, 2, 2]),  # for a stream of the leader, then for its verdict
        (1, [2, 1, 1]),  # the leader waits for the silent one's control stream to close
        (3, [2, 1, 1]),
    ],
)
def test_a_member_that_says_nothing_costs_a_stall_and_is_named(silent: int, stalls: list[int]) -> None:
    tensors = vectors(4, 1000)
    with many(4, 1000) as group:
        results = group.average(contributions(tensors), silent=[silent])
        assert seconds(results) == [took(it * FAST.stall) for it in stalls]
        assert set(outcomes(results)) == {Outcome.TIMEOUT}
        assert {it.culprits for it in results} == {("abcd"[silent],)}
        again = group.average(contributions(tensors))  # nothing of the failed attempt is left
        assert outcomes(again) == [Outcome.MERGED] * 4


class Dribble:
    """A line so slow that what is one write elsewhere takes ``seconds``."""

    def __init__(self, stream: Channel, seconds: float) -> None:
        self._stream, self._seconds, self.bandwidth = stream, seconds, stream.bandwidth
        self.direct = None

    async def read_into(self, out: memoryview, timeout: float) -> None:
        raise NotImplementedError

    async def write(self, data: bytes, timeout: float) -> None:
        for byte in range(8):
            await asyncio.sleep(self._seconds / 8)
            await self._stream.write(data[len(data) * byte // 8 : len(data) * (byte + 1) // 8], timeout)


def slow_line(monkeypatch: pytest.MonkeyPatch, seconds: float, sender: int, receiver: int) -> None:
    """In the first half."""
    send, encoded, late = flow_control.send_parts, all_reduce.encoded, list[Any]()

    def told(rounding: Rounding, payload: Readable) -> AsyncIterator[bytes]:
        found, first = encoded(rounding, payload), torch.empty(1)
        payload.read(0, first)
        late.extend([found] if isinstance(payload, Slice) and float(first) == sender else [])
        return found

    async def slow(stream: FlowControlledStream, data: AsyncIterator[bytes], stall: float) -> None:
        here = any(it is data for it in late) and stream._stream.remote == "abc"[receiver]
        await send(Dribble(stream, seconds) if here else stream, data, stall)

    monkeypatch.setattr(all_reduce, "encoded", told)
    monkeypatch.setattr(flow_control, "send_parts", slow)


def test_a_member_that_waits_for_others_between_the_two_halves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of one member's data and waits for another's: on slow links that takes longer than a stall."""
    slow_line(monkeypatch, 1.5, sender=5, receiver=1)
    with many(3, 1000, settings=ExchangeConfig(codec="none", stall=0.5)) as group:
        averaged = group.average([Vector(torch.full((1000,), float(place))) for place in (3, 4, 5)])
        assert [it.outcome for it in averaged] == [Outcome.MERGED] * 3, averaged
        assert seconds(averaged) == [took(2 * 1.5)] * 3  # its part, and the part's digest
        assert all(bool((it.mean == 4).all()) for it in averaged)


def test_a_member_that_freezes_between_the_two_halves_costs_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FlowControlledStream._frame
    frozen = asyncio.Event()

    async def freezes(stream: FlowControlledStream, kind: int, data: bytes = b"") -> None:
        if stream._stream.remote == "a" and (
            kind == FrameKind.ACKNOWLEDGED or frozen.is_set()
        ):  # it has the first half and says no more
            frozen.set()
            await asyncio.sleep(60)
        await frame(stream, kind, data)

    monkeypatch.setattr(FlowControlledStream, "_frame", freezes)
    with many(2, 1000, settings=ExchangeConfig(codec="none", stall=0.5)) as group:
        averaged = group.average(contributions(vectors(2, 1000)))
        assert seconds(averaged) == [took(0.5)] * 2
        assert [it.outcome for it in averaged] == [Outcome.TIMEOUT] * 2, averaged
        assert {it.culprits for it in averaged} == {("b",)}


def test_a_member_that_cannot_be_dialled_is_named_at_once() -> None:
    with many(3, 1000) as group:
        group.members[2].answers = False
        results = group.average(contributions(vectors(3, 1000)))
        assert seconds(results) == [took(0.0)] * 3
        assert [it.culprits for it in results] == [("c",)] * 3
        assert "peer-c" in results[0].detail


@pytest.mark.parametrize(
    ("says", "culprits"),
    [
        ({1: 3}, ("d", "b")),  # nobody else says so: one of the two is to blame
        ({1: 3, 2: 3}, ("d",)),
        ({1: 2, 2: 3, 3: 2}, ("c",)),
        ({1: 2, 2: 1}, ("b", "c")),
        ({0: 2}, ("c",)),  # what the leader sees
        ({1: 2, 0: 2}, ("c",)),
    ],
)
def test_one_member_cannot_have_another_one_left_out_at_no_cost(
    monkeypatch: pytest.MonkeyPatch, says: dict[int, int], culprits: tuple[str, ...]
) -> None:
    combine = AllReduceExchange._combine

    async def accuses(exchange: AllReduceExchange, own: Vector, streams: GroupStreams) -> None:
        await combine(exchange, own, streams)
        if (accused := says.get(streams.assembly.me)) is not None:
            raise GroupFailure(accused, Outcome.TIMEOUT, "it does not answer")

    monkeypatch.setattr(AllReduceExchange, "_combine", accuses)
    with many(4, 1000) as group:
        results = group.average(contributions(vectors(4, 1000)))
        assert seconds(results) == [took(0.0)] * 4
    assert {it.culprits for it in results} == {culprits}
    alone, ids = len(culprits) == 2, "abcd"
    for place, averaged in enumerate(results):  # what only the leader says may be its lie
        saw = place == 0 or (place in says and ids[says[place]] in culprits)
        assert averaged.certain == (saw and not alone)


def blaming_c(monkeypatch: pytest.MonkeyPatch, seen: dict[int, Outcome]) -> list[Averaged]:
    """What four members get when those in ``seen``, by place, blame c for it."""
    combine = AllReduceExchange._combine

    async def accuses(exchange: AllReduceExchange, own: Vector, streams: GroupStreams) -> None:
        await combine(exchange, own, streams)
        if (outcome := seen.get(streams.assembly.me)) is not None:
            raise GroupFailure(2, outcome, "something is wrong with it")

    monkeypatch.setattr(AllReduceExchange, "_combine", accuses)
    with many(4, 1000) as group:
        return group.average(contributions(vectors(4, 1000)))


def test_a_liar_makes_no_worse_of_what_another_member_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has lost its connection to c, and d lies."""
    results = blaming_c(monkeypatch, {1: Outcome.TIMEOUT, 3: Outcome.CORRUPT})
    assert [(it.culprits, it.outcome) for it in results] == [(("c",), Outcome.TIMEOUT)] * 4


def test_what_a_member_saw_late_is_no_lie_because_the_leader_calls_it_one(monkeypatch: pytest.MonkeyPatch) -> None:
    results = blaming_c(monkeypatch, {0: Outcome.CORRUPT, 1: Outcome.TIMEOUT, 3: Outcome.CORRUPT})
    assert [(it.culprits, it.outcome) for it in results] == [(("c",), Outcome.CORRUPT)] * 4
    assert [it.certain for it in results] == [True, False, False, True]


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_who_is_too_slow_for_the_deadline_is_named(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Each member named itself."""
    send, exchange, me = flow_control.send_parts, all_reduce._Reduction.exchange, ContextVar[int]("me")

    async def marked(work: all_reduce._Reduction, place: int) -> None:
        me.set(work._me)
        await exchange(work, place)

    async def trickle(stream: FlowControlledStream, parts: Iterator[Any], stall: float) -> None:
        await send(Dribble(stream, 60.0) if me.get() == slow else stream, parts, stall)

    monkeypatch.setattr(all_reduce._Reduction, "exchange", marked)
    monkeypatch.setattr(flow_control, "send_parts", trickle)
    with many(4, 1000, settings=ExchangeConfig(codec="none", stall=10.0), phase_seconds=1.0) as group:
        results = group.average(contributions(vectors(4, 1000)))
    assert {it.culprits for it in results} == {("abcd"[slow],)}, results
    name = f"peer-{'abcd'[slow]}"
    assert all(f"{name} is the slowest: too slow: payload 1 of {name}" in it.detail for it in results)
    assert seconds(results) == [took(20.0, more=0.1)] * 4  # after the second of four looks


@pytest.mark.parametrize("silent", [0, 2])
def test_who_is_silent_after_its_last_bytes_costs_a_stall(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    """A leader without a verdict, or a member without a report: not the limit of a round, which may be hours."""
    names = {0: "_lead", 2: "_follow"}
    decide = getattr(AllReduceExchange, names[silent])

    async def says_nothing(exchange: Any, work: Any, assembly: Any, deadlines: RoundDeadlines) -> Any:
        if assembly.me == silent:
            await work
            await asyncio.sleep(20.0)
        return await decide(exchange, work, assembly, deadlines)

    monkeypatch.setattr(AllReduceExchange, names[silent], says_nothing)
    with many(3, 1000, settings=ExchangeConfig(codec="none", stall=2.0), phase_seconds=1000.0) as group:
        results = group.average(contributions(vectors(3, 1000)))
    others = [it for place, it in enumerate(results) if place != silent]
    assert {it.culprits for it in others} == {("abc"[silent],)}, results
    assert max(seconds(others)) < 2.0 + 1.0 + 0.5  # a stall, and a second until its stream has closed


def test_a_member_waits_for_the_verdict_of_a_leader_that_is_done_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It called the leader gone while that waited as long for a third member: they left out two different ones."""
    attempt, follow = AllReduceExchange._attempt, AllReduceExchange._follow

    async def done_later(exchange: Any, own: Any, round: int, streams: GroupStreams, limit: float) -> MemberReport:
        report = await attempt(exchange, own, round, streams, limit)
        await asyncio.sleep(0.2 if streams.assembly.me == 0 else 0.0)
        return report

    async def says_nothing(exchange: Any, work: Any, assembly: Any, deadlines: RoundDeadlines) -> Any:
        if assembly.me == 2:
            await asyncio.sleep(20.0)
        return await follow(exchange, work, assembly, deadlines)

    monkeypatch.setattr(AllReduceExchange, "_attempt", done_later)
    monkeypatch.setattr(AllReduceExchange, "_follow", says_nothing)
    with many(3, 1000, settings=ExchangeConfig(codec="none", stall=2.0), phase_seconds=1000.0) as group:
        leader, member, _ = group.average(contributions(vectors(3, 1000)))
    assert leader.culprits == member.culprits == ("c",)


def test_a_slow_member_is_waited_for_as_long_as_it_will_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for it in the middle of a round of 400 s, without a payload from one another."""
    slow_line(monkeypatch, 80.0, sender=5, receiver=1)
    with many(3, 1000, settings=ExchangeConfig(codec="none", stall=11.0), phase_seconds=100.0) as group:
        averaged = group.average([Vector(torch.full((1000,), float(place))) for place in (3, 4, 5)])
    assert [it.outcome for it in averaged] == [Outcome.MERGED] * 3, averaged
    assert seconds(averaged) == [took(2 * 80.0, more=0.1)] * 3  # its part, and the part's digest


def test_different_results_are_found_before_anybody_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that sends one member other bytes than the rest, with a right digest."""
    combine = AllReduceExchange._combine

    async def lying(exchange: AllReduceExchange, own: Vector, streams: GroupStreams) -> None:
        await combine(exchange, own, streams)
        if streams.assembly.me == 2:
            exchange._buffer[5] += 1

    monkeypatch.setattr(AllReduceExchange, "_combine", lying)
    tensors = vectors(4, 1000)
    with many(4, 1000) as group:
        results = group.average(contributions(tensors))
    assert set(outcomes(results)) == {Outcome.CORRUPT}
    for number, it in enumerate(results):
        assert it.culprits == ("c",)
        assert torch.equal(it.mean, tensors[number])


def test_a_verdict_that_comes_before_the_work_is_done_is_not_believed() -> None:
    with many(2, 1000) as group:
        groups = group.groups()

        async def lie() -> None:
            await group.controls[0][1].send(GroupVerdict(commit=True), 1)

        group.members[0].thread.call(lie(), 2)
        (member,) = group.average(contributions(vectors(2, 1000)), silent=[0], groups=groups)
        assert (member.outcome, member.digest) == (Outcome.CORRUPT, "")


def test_a_convener_that_dies_before_its_verdict_leaves_everything_as_it_was() -> None:
    tensors = vectors(2, 1000)
    with many(2, 1000) as group:
        groups = group.groups()

        async def die() -> None:
            await group.controls[0][1].receive(MemberReport, 5)
            group.controls[0][1].close()

        dying = asyncio.run_coroutine_threadsafe(die(), group.members[0].thread.loop)
        (member,) = group.average(contributions(tensors), silent=[0], groups=groups)
        dying.result(5)
        assert (member.outcome, member.culprits) == (Outcome.TIMEOUT, ("a",))
        assert torch.equal(member.mean, tensors[1])


@pytest.mark.parametrize(
    ("report", "culprits"),
    [
        (MemberReport(culprit=200, outcome=Outcome.TIMEOUT, detail="x"), ("b",)),
        (MemberReport(), ("b",)),
        (MemberReport(culprit=0), ("b",)),
    ],
)
def test_a_member_that_reports_nonsense_is_named(report: MemberReport, culprits: tuple[str, ...]) -> None:
    with many(3, 1000) as group:
        groups = group.groups()

        async def nonsense() -> None:
            await group.controls[1][0].send(report, 1)

        group.members[1].thread.call(nonsense(), 2)
        results = group.average(contributions(vectors(3, 1000)), silent=[1], groups=groups)
        assert Outcome.MERGED not in outcomes(results)
        assert {it.culprits for it in results} == {culprits}


@pytest.mark.parametrize(
    ("commit", "outcome"), [(False, Outcome.MERGED), (True, Outcome.POISONED), (False, Outcome.ALONE)]
)
def test_a_verdict_that_contradicts_itself_or_sends_all_away_is_not_believed(commit: bool, outcome: Outcome) -> None:
    """Else replicas that must be equal would take the step of a group of one."""
    tensors = vectors(2, 1000)
    with many(2, 1000) as group:
        groups = group.groups()

        async def lie() -> None:
            await group.controls[0][1].receive(MemberReport, 5)
            await group.controls[0][1].send(GroupVerdict(commit=commit, outcome=outcome), 1)

        lying = asyncio.run_coroutine_threadsafe(lie(), group.members[0].thread.loop)
        (member,) = group.average(contributions(tensors), silent=[0], groups=groups)
        lying.result(5)
        assert (member.outcome, member.culprits, member.digest) == (Outcome.CORRUPT, ("a",), "")
        assert torch.equal(member.mean, tensors[1])


# -- sparse


@pytest.mark.parametrize("count", [2, 3, 5])
def test_sparse_contributions_give_each_elements_mean_over_its_senders(count: int) -> None:
    own = [sparse(seed) for seed in range(count)]
    expected = torch.empty(600)
    mean_of_senders(own, expected)
    with many(count, own[0].values.numel(), 600) as group:
        results = group.average(own)
        assert outcomes(results) == [Outcome.MERGED] * count, [it.detail for it in results]
        for it in results:
            assert torch.equal(it.mean, expected)
            assert it.bytes_sent < (count - 1) * (4 * own[0].values.numel() + 1000)


@pytest.mark.parametrize(("count", "length"), [(2, 32.0), (3, 1.5), (5, 1.5)])
def test_a_sparse_contribution_counts_as_far_as_usual_ones_are_long(count: int, length: float) -> None:
    """All of its coefficients counted, however large they were."""
    own = [sparse(0) for _ in range(count)]  # of the same coefficients
    values = own[0].values.clone()
    own[1] = replace(own[1], values=32 * values)
    with many(count, values.numel(), 600) as group:
        results = group.average(own)
    assert outcomes(results) == [Outcome.MERGED] * count
    for it in results:
        mean = it.mean[own[0].positions]
        torch.testing.assert_close(mean, (count - 1 + length) / count * values, rtol=1e-3, atol=1e-3)


def test_a_sparse_position_outside_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [sparse(seed) for seed in range(3)]
    bad = own[1]
    beyond = SparseContribution(bad.numel, bad.bases, bad.bases + 65535, bad.values)
    monkeypatch.setattr(all_gather, "pack", lambda it: pack(beyond if it is bad else it))
    with many(3, bad.values.numel(), 600) as group:
        results = group.average(own)
        assert set(outcomes(results)) == {Outcome.POISONED}
        assert {it.culprits for it in results} == {("b",)}


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), chunk=st.sampled_from([1, 50, 300]), keep=st.integers(1, 50))
def test_what_is_packed_comes_back(seed: int, chunk: int, keep: int) -> None:
    one = sparse(seed, 300, chunk, min(keep, chunk))
    packed = pack(one)
    assert packed.dtype == torch.float32
    assert packed.numel() == one.values.numel()
    back = unpack(packed.clone(), one)
    assert torch.equal(back.positions, one.positions)
    assert torch.equal(back.values, one.values)
