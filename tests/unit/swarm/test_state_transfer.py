"""From which member does a peer take the state when it joins or comes back?"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from statistics import median_high
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer import clock
from peer.errors import RunError, UserError
from peer.logs import LOGGER
from peer.p2p.budgets import STATE_REQUESTS
from peer.p2p.deadline import TooSlow
from peer.p2p.event_loop import LoopThread
from peer.p2p.greeting import OTHER_LAYOUT, MemberIdentity
from peer.p2p.payload import receive_fp32
from peer.p2p.stream import Stream, StreamLost
from peer.process import Stop
from peer.rounds.backoff import Proven
from peer.rounds.state import State
from peer.rounds.types import Seat
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer import join
from peer.swarm.state_transfer.donor import STATE_ANSWER, Donor, DonorFull, StateHeader, StateReceived, StateRequest
from peer.swarm.state_transfer.donors import DONOR_AHEAD, NEAR_ROUNDS, donors_of, furthest, plausible
from peer.swarm.state_transfer.download import DonorBehind, DonorBusy
from peer.swarm.state_transfer.join import ASK_ALL_PAUSE, STOP_PERIOD, UP_TO_DATE_REQUESTS, take_from, take_state
from tests.unit.parts import context_of, member_record
from tests.unit.virtual import stream_pair, took

ROUNDS = st.integers(0, 40)


def record(number: int, round: int) -> MemberRecord:
    said = {"name": f"peer-{number}", "config": "c0ffee", "step": 25 * round, "tokens_per_second": 100.0}
    return member_record(f"Qm{number}", round).model_copy(update=said)


def rounds(members: list[int], above: int, reached: int) -> list[int]:
    return [it.round for it in donors_of([record(*it) for it in enumerate(members)], above, reached)]


@given(st.lists(ROUNDS, max_size=8), ROUNDS, ROUNDS)
def test_there_is_a_donor_when_anybody_is_further_and_each_is_as_far_as_half_of_all(
    members: list[int], above: int, reached: int
) -> None:
    found = rounds(members, above, reached)
    trained = [it for it in members if it]
    said = (trained if len(trained) > 1 else members) or [0]
    usual = min(said) if len(said) == 2 < len(members) else median_high(said)
    assert bool(found) == any(it > above for it in members)
    for it in found:
        assert it > above
        assert it > usual - NEAR_ROUNDS
        assert it >= min(reached, usual)  # nothing is done again that others have


def test_newcomers_spread_and_who_comes_back_takes_what_it_had() -> None:
    assert rounds([12, 16, 17, 20], above=0, reached=0) == [16, 17, 20]
    assert rounds([12, 16, 17, 20], above=10, reached=17) == [17, 20]
    assert rounds([12, 16, 17, 20], above=10, reached=30) == [17, 20]
    assert rounds([12, 20], above=10, reached=30) == [20]
    assert rounds([12, 16, 17, 20], above=20, reached=30) == []


@pytest.mark.parametrize("claimed", [150, 10**6])
def test_two_voices_of_many_are_no_measure(claimed: int) -> None:
    """Two ids that said the same became the only donors of every newcomer, with any weights and any step."""
    honest = [record(number, 100) for number in range(20)]
    liars = [record(20 + number, claimed) for number in range(2)]
    believed = plausible([*honest, *liars], 25, 0.0)
    donors = donors_of(believed, above=0, reached=0)
    assert all(it in donors for it in honest)
    assert not any(it in believed for it in liars) or claimed < 1000


def test_peers_that_start_again_without_their_disks_take_the_weights_of_those_that_have_theirs() -> None:
    assert left((0, 0), (0, 0), (0, 0), (5000, 50_000), (5000, 50_000)) == [0, 1, 2, 3, 4]
    assert left((0, 0), (0, 0), (0, 0), (5000, 50_000)) == [0, 1, 2], "one voice"
    assert left((0, 0), (0, 0), (0, 0), (3, 30), (10**6, 10**7)) == [0, 1, 2, 3], "of two voices one may lie"


def left(*members: tuple[int, int], rate: float = 0.0, tokens: float = 0.0) -> list[int]:
    """The places of those that are plausible, of rounds and steps; H is 10. ``rate``: of each, in tokens a second."""
    said = [{"round": round, "step": step, "tokens_per_second": rate} for round, step in members]
    records = [record(number, 5).model_copy(update=it) for number, it in enumerate(said)]
    return [records.index(it) for it in plausible(records, 10, tokens)]


def test_who_says_to_be_much_further_than_all_others_is_no_donor() -> None:
    assert left((17, 170), (16, 160), (10**9, 170)) == [0, 1]
    assert left((17, 170), (16, 160), (16, 10**9)) == [0, 1]
    assert left((17, 170), (22, 220), (18, 180)) == [0, 1, 2]
    assert left((17, 170), (10**9, 10**9)) == [0, 1], "of two, nobody knows which is right"
    assert left() == []


def test_of_two_that_fit_no_measure_the_one_less_far_beyond_it_is_believed() -> None:
    """The lower round was one's and the lower step the other's. A newcomer found no donor, and a member of a group
    whose round had failed ended: there was no furthest of nobody.
    """
    free = {"step": 2**53, "tokens_per_second": 1e-9}
    liars = [record(0, 1).model_copy(update=free), record(1, 0).model_copy(update=free)]
    honest = record(2, 100).model_copy(update={"step": 5000, "tokens_per_second": 1000.0})
    for others in liars, liars[::-1]:
        assert plausible([*others, honest], 50, 1024.0) == [honest]
        assert furthest([*others, honest], 50, 1024.0) == (100 + DONOR_AHEAD, 5000 + DONOR_AHEAD * 50)
    assert left((2**53, 0), (100, 1000), (0, 2**53)) == [1]


def test_a_member_that_was_alone_has_done_no_more_rounds_than_time_allows() -> None:
    """A round of 10 steps with 5 tokens each takes ten seconds: 360 of them in an hour."""
    paced = {"rate": 5.0, "tokens": 5.0}
    assert left((0, 0), (0, 0), (360, 3600), **paced) == [0, 1, 2]
    assert left((0, 0), (0, 0), (361, 3600), **paced) == [0, 1]
    assert left((0, 0), (0, 0), (360, 3601), **paced) == [0, 1]
    assert left((500, 5000), (500, 5000), (1360, 13600), **paced) == [0, 1, 2], "it may be faster than the others"
    assert left((500, 5000), (500, 5000), (1400, 14000), **paced) == [0, 1]
    assert left((0, 0), (0, 0), (1001, 10010), rate=1e9, tokens=5.0) == [0, 1]


def test_one_member_cannot_raise_the_bound_by_its_own_rate() -> None:
    honest = [record(number, 20).model_copy(update={"tokens_per_second": 5.0}) for number in range(2)]
    liar = record(2, 600).model_copy(update={"tokens_per_second": 1e12})
    assert plausible([*honest, liar], 10, 5.0) == honest


class Listed:
    """The directory of twenty members at the same round."""

    def refresh_all(self) -> list[MemberRecord]:
        return [record(number, 5) for number in range(20)]

    def forget(self, peer_id: str) -> None:
        """It failed."""


class Thread(LoopThread):
    """What of a node is needed here."""

    member = MemberIdentity("a", "r", "c0ffee", "{}", "layout")


def taken(timeout: float, reached: int = 0, stop: Stop | None = None) -> State | None:
    """In virtual time."""
    return take_state(context_of(Thread(), Listed(), stop), [], timeout, above=0, reached=reached)


in_virtual_time = pytest.mark.usefixtures("virtual")


@in_virtual_time
def test_few_are_asked_for_rounds_that_perhaps_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copies its state to answer."""
    asked: list[int] = []

    async def download(*args: Any) -> State:
        asked.append(args[3])
        if args[3] > 5:
            raise DonorBehind
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    found = taken(5, reached=9)
    assert found is not None and found.round == 5
    assert asked == [9] * UP_TO_DATE_REQUESTS + [0]


@in_virtual_time
def test_of_those_that_have_diverged_none_is_asked_that_says_to_be_far_beyond_the_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight hostile ids were the measure of one another: a member took their step, and its run was over."""
    asked: list[str] = []

    async def download(node: Any, of: Any, *args: Any) -> State:
        asked.append(of.peer_id)
        raise StreamLost("no route to host")

    hostile = [record(number, 10**6) for number in range(100, 108)]
    members = [*Listed().refresh_all(), *hostile]
    monkeypatch.setattr(join, "download", download)
    monkeypatch.setattr(Listed, "refresh_all", lambda _: members)
    context, ids = context_of(Thread(), Listed()), [it.peer_id for it in hostile]
    assert take_state(context, [], 0.0, above=-1, among=ids) is None
    with pytest.raises(RunError):
        take_state(context, [], 0.0, above=-1, among=[*ids, "Qm3"])
    assert asked == ["Qm3"]


@in_virtual_time
def test_what_a_donor_fails_of_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A newcomer that could dial none of its twenty donors wrote twenty lines a second."""

    async def download(*args: Any) -> State:
        raise StreamLost("no route to host")

    monkeypatch.setattr(join, "download", download)
    caplog.set_level("WARNING", logger=LOGGER)
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    with pytest.raises(RunError, match="no member gave its weights"):
        taken(10.0)
    said = [it.getMessage() for it in caplog.records]
    assert len(said) == len(set(said)) == 20


@in_virtual_time
@pytest.mark.parametrize("all_of_them", [True, False])
def test_who_has_another_model_than_all_members_is_told_so_at_once(
    all_of_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to try again, after a minute. A liar among others ends nobody."""

    async def download(node: Any, of: Any, *args: Any) -> State:
        raise StreamLost(OTHER_LAYOUT if all_of_them or of.peer_id == "Qm3" else "no route to host")

    monkeypatch.setattr(join, "download", download)
    began = clock.monotonic()
    with pytest.raises(UserError if all_of_them else RunError, match="names or shapes" if all_of_them else "try again"):
        taken(60.0)
    assert (clock.monotonic() - began < 10.0) == all_of_them


@in_virtual_time
def test_a_donor_of_our_configuration_that_names_another_one_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended newcomers, and in a group of everyone who had to take its weights."""
    asked: list[str] = []

    async def download(node: Any, of: Any, *args: Any, **more: Any) -> State:
        asked.append(of.peer_id)
        if len(asked) == 1:
            raise UserError("this configuration is not the swarm's")
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    monkeypatch.setattr(Thread, "member", replace(Thread.member, config=record(0, 5).config))
    found = taken(5)
    assert found is not None and len(asked) == 2 and asked[0] != asked[1]
    asked.clear()
    limits = (10.0, 1000.0)
    assert take_from(context_of(Thread(), Listed()), Seat("a", "a"), [], 5.0, limits) is None
    monkeypatch.setattr(Thread, "member", replace(Thread.member, config="another"))
    asked.clear()
    with pytest.raises(UserError):  # nobody has ours
        taken(5)


def test_nobody_is_further_than_the_plausible_members() -> None:
    members = [record(number, round) for number, round in enumerate((500, 510, 520, 10**9))]
    assert furthest(members, 50, 0.0) == (520 + DONOR_AHEAD, max(it.step for it in members[:3]) + DONOR_AHEAD * 50)


@in_virtual_time
@pytest.mark.parametrize("hours", [3, 5])
def test_a_loss_after_hours_of_download_does_not_end_the_join(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some seconds the donor keeps the place of the lost stream. The bound of the wait for busy donors, four hours,
    counted from the beginning of the download.
    """
    lost: list[float] = []

    async def download(node: Any, of: Any, partial: Any, *args: Any) -> State:
        if not lost:
            await asyncio.sleep(hours * 3600)
            partial.have = 900
            lost.append(clock.monotonic())
            raise StreamLost("the connection broke")
        if clock.monotonic() < lost[0] + 20:
            raise DonorBusy("serves other newcomers")
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    monkeypatch.setattr(join, "state_limit", lambda *_: 1e6)
    monkeypatch.setattr(Listed, "refresh_all", lambda self: [record(0, 5)])
    assert taken(60.0) is not None


@in_virtual_time
@pytest.mark.parametrize("parts", [3, 0])
def test_a_directory_that_has_become_empty_during_a_download_is_no_swarm_without_members(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line was cut for 40 s: the donor failed and was forgotten, nobody else answered, and the newcomer began with
    fresh weights. It does so when nothing came from the only member: that may be dead.
    """
    looks: list[int] = []

    def look(self: Listed) -> list[MemberRecord]:
        looks.append(1)
        return [] if len(looks) in range(2, 9) else [record(0, 5)]

    async def download(node: Any, of: Any, partial: Any, *args: Any) -> State:
        if len(looks) < 9:
            partial.have = parts
            raise StreamLost("no route to host")
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    monkeypatch.setattr(Listed, "refresh_all", look)
    assert (taken(60.0) is not None) is bool(parts)


@in_virtual_time
def test_a_directory_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer whose line failed while it joined ended with a traceback."""

    class Silent(Listed):
        looks = 0

        def refresh_all(self) -> list[MemberRecord]:
            self.looks += 1
            if self.looks < 3:
                raise RunError("the swarm's directory does not answer")
            return super().refresh_all()

    async def download(*args: Any) -> State:
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    began = clock.monotonic()
    found = take_state(context_of(Thread(), Silent()), [], 5.0, above=0)
    assert found is not None and found.round == 5
    assert clock.monotonic() - began == took(2 * join.ASK_ALL_PAUSE)
    for timeout in 0.0, 1.0:
        with pytest.raises(RunError, match="directory does not answer"):
            take_state(context_of(Thread(), Silent()), [], timeout, above=0)


@in_virtual_time
@pytest.mark.parametrize(
    ("slow", "order"),
    [
        ({0}, [0, 1]),
        ({0, 1}, [0, 1, 2]),
        ({0, 1, 2}, [0, 1, 2]),  # our own link is: the third is waited for
    ],
)
def test_a_slow_donor_is_left_for_others_until_it_is_our_own_link(
    monkeypatch: pytest.MonkeyPatch, slow: set[int], order: list[int]
) -> None:
    asked: list[int] = []

    async def download(*args: Any) -> State:
        number = int(args[1].name.removeprefix("peer-"))
        asked.append(number)
        if number in slow and args[4] == join.SHORT_PATIENCE:
            raise TooSlow
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    monkeypatch.setattr(join.random, "shuffle", lambda donors: None)
    assert taken(5) is not None
    assert asked == order


@in_virtual_time
def test_donors_that_serve_others_are_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, free_at = 0, 20 * 30  # requests to twenty members

    async def download(*args: Any) -> State:
        nonlocal asked
        asked += 1
        if asked <= free_at:
            raise DonorBusy("serves other newcomers")
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    with pytest.raises(RunError, match="serves other newcomers"):
        taken(0.0)  # a peer that trains meanwhile asks once
    assert asked == 20
    began = clock.monotonic()
    assert taken(3.0) is not None
    assert clock.monotonic() - began == took(29 * ASK_ALL_PAUSE)
    free_at, began = 10**9, clock.monotonic()
    monkeypatch.setattr(join, "LONGEST_WAIT", 60.0)
    with pytest.raises(RunError, match="serves other newcomers"):
        taken(3.0)  # never free
    assert clock.monotonic() - began == took(60.0, more=ASK_ALL_PAUSE)


@in_virtual_time
def test_who_gets_on_from_donor_to_donor_does_not_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is lost in mid-way."""

    async def download(*args: Any) -> State:
        partial, last = args[2], int(args[1].name.removeprefix("peer-")) == 19
        partial.have += last and partial.have < 10
        if partial.have < 10 or not done:
            raise StreamLost("it has hung up")
        return State(125, 5, [])

    monkeypatch.setattr(join, "download", download)
    done = True
    assert taken(2.5) is not None
    done, began = False, clock.monotonic()
    with pytest.raises(RunError, match="it has hung up"):
        taken(2.5)
    assert clock.monotonic() - began == took(9 * ASK_ALL_PAUSE + 3.0)  # ten parts, and then no more


@in_virtual_time
def test_a_peer_that_is_stopped_leaves_its_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, began = Stop(), clock.monotonic()

    async def download(*args: Any) -> State:
        asyncio.get_running_loop().call_later(5.05, stop.request)
        await asyncio.sleep(3000)
        raise AssertionError

    monkeypatch.setattr(join, "download", download)
    assert taken(10.0, stop=stop) is None
    assert clock.monotonic() - began == took(5.05, more=STOP_PERIOD)


async def come(donor: Donor, name: str) -> tuple[Stream, asyncio.Future[None], DonorFull | StateHeader]:
    """A newcomer asks for the state: its end of the stream, the donor's work, and the answer."""
    ours, theirs = await stream_pair()
    theirs.remote = name
    serving = asyncio.ensure_future(donor.serve(theirs))
    await ours.send(StateRequest(), 5)
    return ours, serving, await ours.receive(STATE_ANSWER, 5)


async def test_a_donor_serves_two_newcomers_at_a_time() -> None:
    """Each costs it a copy of its state and a share of its uplink. Five come at once; then one is done."""
    phi = torch.randn(1000)

    async def end(stream: Stream, serving: asyncio.Future[None], answer: DonorFull | StateHeader) -> None:
        if isinstance(answer, StateHeader):
            out = torch.empty(1000)
            await receive_fp32(stream, out, 5)
            assert torch.equal(out, phi)
            await stream.send(StateReceived(), 5)
            await stream.until_closed(5)
        stream.close()
        await serving

    donor = Donor(lambda: State(30, 3, [phi]), Proven())
    first, *others = [await come(donor, f"newcomer {number}") for number in range(5)]
    full = [isinstance(answer, DonorFull) for *_, answer in (first, *others)]
    assert full == [False, False, True, True, True]
    await end(*first)
    later = await come(donor, "later")
    assert isinstance(later[2], StateHeader)
    for newcomer in (*others, later):
        await end(*newcomer)


async def test_who_asks_for_the_state_again_and_again_is_given_it_a_few_times() -> None:
    """Each request copies the state, for which the training waits: two ids that did not wait took most of its time."""
    copies = 0

    def snapshot() -> State:
        nonlocal copies
        copies += 1
        return State(30, 3, [torch.randn(10)])

    async def ask(donor: Donor, name: str) -> bool:
        ours, serving, answer = await come(donor, name)
        ours.close()
        await asyncio.gather(serving, return_exceptions=True)
        return isinstance(answer, StateHeader)

    donor = Donor(snapshot, Proven())
    most = int(STATE_REQUESTS.each * STATE_REQUESTS.burst)
    assert [await ask(donor, "greedy") for _ in range(20)] == [True] * most + [False] * (20 - most)
    assert copies == most
    assert await ask(donor, "newcomer")


async def test_one_newcomer_cannot_take_both_places_of_a_donor() -> None:
    """One that opened stream after stream, and never said that the weights had come, kept others from joining."""
    donor = Donor(lambda: State(30, 3, [torch.randn(1000)]), Proven())
    came = [await come(donor, name) for name in ("greedy", "greedy", "greedy", "newcomer")]
    assert [isinstance(answer, DonorFull) for *_, answer in came] == [False, True, True, False]
