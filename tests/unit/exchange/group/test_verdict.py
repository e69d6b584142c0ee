"""How a round ends: when the leader decides, what a member believes, and a member that does not hear it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from peer import clock
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import GroupStreams, IncomingStreams
from peer.exchange.group.verdict import believed, decided, nobody, sane, until_decided
from peer.exchange.group.wire import GroupFailure, GroupVerdict, Hello, MemberReport
from peer.exchange.pair.wire import Header
from peer.p2p.deadline import running
from peer.p2p.stream import StreamLost
from peer.rounds.contribution import Vector
from peer.rounds.types import Assembly, Outcome, Seat
from tests.unit.exchange.group.harness import many
from tests.unit.virtual import stream_pair, took


def test_who_does_not_hear_the_verdict_keeps_the_digest_of_what_others_may_have_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hear = AllReduceExchange._hear

    async def deaf(exchange: Any, kind: Any, *rest: Any) -> Any:
        said = await hear(exchange, kind, *rest)
        if kind is GroupVerdict and exchange.network._me.name == "c":
            raise StreamLost("it is lost")
        return said

    monkeypatch.setattr(AllReduceExchange, "_hear", deaf)
    tensors = [torch.full((100,), float(number)) for number in range(3)]
    with many(3, 100) as group:
        *rest, last = group.average([*map(Vector, tensors)])
        assert (last.outcome, last.digest, last.unheard) == (Outcome.TIMEOUT, "", rest[0].digest)
        assert torch.equal(last.mean, tensors[2])
        assert [(it.outcome, it.unheard) for it in rest] == [(Outcome.MERGED, "")] * 2


def test_who_hears_that_nobody_uses_the_result_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = AllReduceExchange._combine

    async def fails(exchange: Any, own: Vector, streams: GroupStreams) -> None:
        await combine(exchange, own, streams)
        if streams.assembly.me == 1:
            raise GroupFailure(2, Outcome.TIMEOUT, "it does not answer")

    monkeypatch.setattr(AllReduceExchange, "_combine", fails)
    with many(3, 100) as group:
        results = group.average([Vector(torch.ones(100))] * 3)
        assert [(it.outcome, it.digest, it.unheard) for it in results] == [(Outcome.TIMEOUT, "", "")] * 3


async def test_a_member_that_calls_twice_holds_one_stream() -> None:
    """The first stream was forgotten and stayed open: 384 of them let nobody in for the rest of the process."""
    incoming, streams = IncomingStreams(), []
    for _ in range(3):
        ours, theirs = await stream_pair()
        theirs.remote = "QmA"
        await ours.send(Hello(token="t", index=1, header=Header(payload_bytes=0, round=3)), 5)
        await incoming.accept(theirs)
        streams.append(theirs)
    closed = [it.closed for it in streams]
    incoming.clear()
    assert [*closed, streams[-1].closed] == [True, True, False, True]


SEEN = MemberReport(culprit=2, outcome=Outcome.TIMEOUT, detail="it does not answer")
POISONED = MemberReport(culprit=0, outcome=Outcome.POISONED, detail="a false mean")
MERGED = MemberReport(digest="d")
AGAINST = nobody(Outcome.TIMEOUT, "it does not answer", 2)


@pytest.mark.parametrize(
    ("said", "seen", "outcome", "culprits", "certain"),
    [
        (AGAINST, SEEN, Outcome.TIMEOUT, (2,), True),
        (AGAINST, MERGED, Outcome.TIMEOUT, (2,), False),
        (AGAINST, None, Outcome.TIMEOUT, (2,), False),
        (AGAINST, POISONED, Outcome.POISONED, (0,), True),
        (GroupVerdict(commit=True), POISONED, Outcome.POISONED, (0,), True),
        (GroupVerdict(commit=True), SEEN, Outcome.CORRUPT, (), True),
        (GroupVerdict(commit=True), None, Outcome.CORRUPT, (), True),
        (GroupVerdict(commit=False), MERGED, Outcome.CORRUPT, (0,), True),
    ],
)
def test_a_member_believes_a_verdict_as_far_as_it_fits_what_it_has_seen(
    said: GroupVerdict, seen: MemberReport | None, outcome: Outcome, culprits: tuple[int, ...], *, certain: bool
) -> None:
    it = believed(said, seen)
    assert (it.commit, it.outcome, it.culprits, it.certain) == (False, outcome, culprits, certain)


SEATS = tuple(Seat(name, f"peer-{name}") for name in "abcde")
CONTRADICTION = {"outcome": Outcome.POISONED, "detail": "they say different things"}


def verdict_on(*reports: MemberReport, at: int = 4) -> GroupVerdict:
    """Of the leader, whose own report and those of most are good; ``reports``: of the members from place ``at`` on."""
    good = [MemberReport(digest="d")] * at
    said = {place: sane(report, place) for place, report in enumerate((*good, *reports))}
    return decided(said, Assembly("token", SEATS, 0, {}))


def test_a_lone_accuser_is_a_suspect_too_whomever_it_names() -> None:
    """It named two others that contradict each other, and was never left out itself."""
    one = verdict_on(MemberReport(culprit=1, **CONTRADICTION))
    two = verdict_on(MemberReport(culprit=1, other=2, **CONTRADICTION))
    assert (one.culprits, one.certain) == ((1, 4), False)
    assert (two.culprits, two.certain) == ((1, 2, 4), False)


@pytest.mark.parametrize("said", [{"other": 1}, {"culprit": 1, "other": 1}, {"culprit": 1, "other": 2, "digest": "d"}])
def test_half_a_contradiction_is_a_lie_of_who_tells_it(said: dict[str, Any]) -> None:
    """The one that it named was left out for certain."""
    verdict = verdict_on(MemberReport(**{**CONTRADICTION, **said}))
    if "digest" not in said:
        assert verdict.culprits == (4,)
    assert not verdict.commit and set(verdict.culprits) != {1}


def test_whom_two_contradict_is_a_suspect_with_one_of_them() -> None:
    both = [MemberReport(culprit=1, other=place, **CONTRADICTION) for place in (4, 3)]
    verdict = verdict_on(*both, at=3)
    assert 1 in verdict.culprits and len(verdict.culprits) == 2 and not verdict.certain


def test_a_member_uses_the_result_when_it_has_one_and_the_leader_says_so() -> None:
    assert believed(GroupVerdict(commit=True), MERGED).commit


@pytest.mark.parametrize(("failed_at", "seconds"), [(None, 9.0), (0.0, 1.0), (2.0, 3.0)])
async def test_after_the_first_failure_only_reports_that_come_soon_count(
    failed_at: float | None, seconds: float
) -> None:
    async def after(delay: float, report: MemberReport) -> MemberReport:
        await asyncio.sleep(delay)
        return report

    began = clock.monotonic()
    second = after(failed_at or 0.0, MERGED if failed_at is None else MemberReport(outcome=Outcome.TIMEOUT))
    async with running(after(0.0, MERGED), second, after(9.0, MERGED)) as coming:
        reports = await until_decided(dict(enumerate(coming)), 1.0)
    assert (clock.monotonic() - began, sorted(reports)) == (took(seconds), [0, 1, 2] if failed_at is None else [0, 1])
