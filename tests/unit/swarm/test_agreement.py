"""The one meeting that a peer has agreed on, and what ends it; who does not answer a proposal."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast
from unittest.mock import Mock

import pytest

from peer import clock
from peer.config.schema import RendezvousConfig
from peer.logs import LOGGER
from peer.p2p.event_loop import RESTART_SECONDS, LoopThread
from peer.p2p.stream import BadMessage, StreamLost
from peer.rounds.progress import Progress
from peer.swarm.context import BoundaryClock, Decline, SwarmContext
from peer.swarm.directory.directory import KEPT_NAMES, Members
from peer.swarm.directory.reader import Entry
from peer.swarm.grouping.matchmaking import GroupMatchmaking
from peer.swarm.healing import Origin
from peer.swarm.pairing.agreement import PROPOSAL_ANSWER, Accept, Agreement, Meeting, PartnerReady, Propose
from peer.swarm.pairing.candidate_order import MANY_DECLINE
from peer.swarm.pairing.matchmaking import PairMatchmaking
from peer.swarm.pairing.proposals import Proposals
from tests.unit.parts import context_of, member_record
from tests.unit.virtual import stream_pair, virtual_time


def training(node: Any, members: Any = None, *, phase_seconds: float, steps_left: int = 10) -> SwarmContext:
    """Of a peer within an inner phase of ten steps."""
    context = context_of(node, members or Mock())
    context.training.progress.begin(steps_left, 10)
    context.training.progress.step_seconds = phase_seconds / 10
    return context


def on_this_loop() -> Any:
    """A node whose background tasks run on the test's event loop."""
    node = Mock(background=asyncio.ensure_future)
    node.member.name, node.member.config = "me", "c"
    return node


def proposals_of(context: SwarmContext, round: int = 0) -> Proposals:
    agreement = Agreement(context)
    agreement.round = round
    return Proposals(context, RendezvousConfig(), Origin(), agreement)


@pytest.mark.parametrize("step", ["end_run", "end_swaps"])
async def test_who_has_made_its_last_inner_step_or_swap_calls_off_the_meeting_of_before(step: str) -> None:
    """The one was agreed with a peer that may still train, and whose contribution would not be the plain mean's; to the
    other one this peer would not come.
    """
    mine, theirs = await stream_pair()
    context = context_of(on_this_loop(), Mock())
    agreement, boundary = Agreement(context), context.boundary
    agreement.commit(mine, "partner", Accept(eta=1.0), 1.0)
    meeting: Any = agreement.meeting
    await getattr(agreement, step)()
    assert (boundary.run_ended, boundary.swaps_ended) == (step == "end_run", step == "end_swaps")
    assert agreement.meeting is None
    assert meeting.came.result() is False
    with pytest.raises(StreamLost):
        await theirs.receive(PartnerReady, 5)


@pytest.mark.parametrize(("avoided", "off"), [("B", True), ("C", False)])
def test_a_meeting_with_a_peer_that_is_avoided_since_is_off(thread: LoopThread, avoided: str, off: bool) -> None:
    """A merge may be undone after its partner was found again for the next boundary. One with another peer stays, until
    it is called off.
    """
    mine, theirs = thread.call(stream_pair(), 5)
    context = context_of(thread, Mock())
    matchmaking = PairMatchmaking(context, RendezvousConfig(), Origin())

    async def agree() -> None:
        matchmaking._agreement.commit(mine, "partner", Accept(eta=1.0), 1.0)

    thread.call(agree(), 5)
    matchmaking.avoid(avoided, offence=True)
    clock.sleep(1.0)
    assert context.backoff.avoided(avoided) and (matchmaking._agreement.meeting is None) is off
    if not off:
        matchmaking.call_off("another state replaces this one")
        clock.sleep(1.0)
        assert matchmaking._agreement.meeting is None
    with pytest.raises(StreamLost):
        thread.call(theirs.receive(PartnerReady, 5), 20)


def test_an_error_does_not_end_what_a_peer_does_in_the_background(thread: LoopThread) -> None:
    """Nobody was asked for a meeting any more, no leader for a seat, and the record ended."""
    node, begun = cast("Any", thread), list[str]()

    async def serve_members(*_: Any) -> None: ...

    def fails(name: str) -> Any:
        async def work() -> None:
            begun.append(name)
            raise ValueError

        return work

    node.serve_members, node.own = serve_members, Mock()
    context = context_of(node, Mock())
    pairs = PairMatchmaking(context, RendezvousConfig(), Origin())
    group = GroupMatchmaking(context, 600.0, equal=True)
    members: Any = Members(node, "run", Mock())
    pairs._proposals.seek = fails("seek")  # type: ignore[method-assign]
    group._keep_joined = fails("join")  # type: ignore[method-assign]
    members._keep_announcing = fails("announce")
    for part in (lambda: pairs.start(0), lambda: group.start(0), members.start):
        part()
    clock.sleep(1.5 * RESTART_SECONDS)
    assert sorted(begun) == ["announce", "announce", "join", "join", "seek", "seek"]


@pytest.mark.parametrize(("eta", "waited"), [(25.0, 0.0), (9.0, 1.5 * 9.0 + 2.0)])
async def test_a_partner_that_comes_more_than_a_phase_later_is_not_waited_for(
    eta: float, waited: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A boundary came earlier than announced: the wait was three phases, and could pass the deadline of the round."""
    caplog.set_level("INFO", logger=LOGGER)
    ours, _theirs = await stream_pair()
    context, avoided = training(Mock(proven={ours.remote}), phase_seconds=10.0), list[str]()
    context.boundary.here = True
    matchmaking = PairMatchmaking(context, RendezvousConfig(), Origin())
    matchmaking.avoid = lambda peer_id, **_: avoided.append(peer_id)  # type: ignore[method-assign]
    began = clock.monotonic()
    assert await matchmaking._partner_of(Meeting(ours, "b", eta, 0.0), 0.0) is None
    assert "round=1" in caplog.text, "the number that the round has in the line of its end"
    assert clock.monotonic() - began == pytest.approx(waited, abs=0.3) and bool(avoided) == bool(waited)


@pytest.mark.parametrize(
    ("step", "announced", "here", "off"),
    [
        ("postpone", 2.0, False, True),
        ("postpone", 22.0, False, False),
        ("postpone", 2.0, True, False),
        ("call_off", 22.0, False, True),
        ("call_off", 2.0, True, False),
    ],
)
async def test_who_postpones_its_boundary_calls_off_the_meeting_that_was_to_be_now(
    step: str, announced: float, here: bool, off: bool
) -> None:
    """The partner waited for it, and took it for one that does not come. One for the next boundary stays, unless
    another state replaces this one; so does one of the boundary before, at which the partner is still awaited.
    """
    mine, theirs = await stream_pair()
    context = training(on_this_loop(), phase_seconds=20.0)
    agreement = Agreement(context)
    agreement.commit(mine, "partner", Accept(eta=1.0), announced)
    await asyncio.sleep(2.0)
    context.boundary.here = here
    goes_off = agreement.postpone if step == "postpone" else lambda: agreement.call_off("late")
    await goes_off()
    assert (agreement.meeting is None) is off
    if off:
        with pytest.raises(StreamLost):
            await theirs.receive(PartnerReady, 5)
    await goes_off()


@pytest.mark.parametrize(
    ("holds", "comes_after", "by_us", "left_out"),
    [
        ((6.0, 6.0), None, False, 1),
        ((6.0,), None, False, 0),  # its last swap has not ended
        ((0.5,) * 10, None, False, 0),  # it had agreed on another one when our answer came
        ((6.0, 6.0), 0, False, 0),
        ((6.0, 6.0), None, True, 0),
    ],
)
async def test_who_calls_off_more_meetings_than_fill_an_inner_phase_is_left_out(
    holds: tuple[float, ...], comes_after: int | None, by_us: bool, left_out: int
) -> None:
    """And is not met again at that boundary, after one of them."""
    out = list[str]()
    context = training(on_this_loop(), phase_seconds=10.0)
    context.boundary.here = True
    agreement = Agreement(context, out.append)
    for number, seconds in enumerate(holds):
        mine, theirs = await stream_pair()
        agreement.commit(mine, "partner", Accept(eta=10.0), 10.0)
        meeting = agreement.meeting
        assert meeting is not None and theirs is not None
        await asyncio.sleep(seconds)
        if by_us:
            agreement.cancel(meeting)
        theirs.close()
        await asyncio.sleep(0.1)
        agreement.cancel(meeting)
        assert agreement.called_off(mine.remote) is not by_us
        if comes_after == number:
            agreement.came(mine.remote)
    assert len(out) == left_out
    agreement.end_round()
    assert not agreement.called_off(mine.remote)


def test_who_has_made_its_last_step_is_at_its_boundary_unless_a_swap_of_its_runs() -> None:
    """While it judged its last swap nobody could agree to meet it, and who was alone gave up."""
    with virtual_time():
        boundary = BoundaryClock(progress := Progress())
        progress.begin(10, 10)
        clock.sleep(2.0)
        progress.tick()
        with boundary.at_end_of(1):
            progress.swap_begins()
        assert boundary.eta() == 20.0
        boundary.run_ended = True
        assert boundary.eta() == 20.0
        progress.swap_took(3.0)
        assert boundary.eta() == 0.0


@pytest.mark.parametrize(
    ("failure", "heard", "silent", "forgotten", "hung_up"),
    [
        (TimeoutError(), False, True, True, True),
        (TimeoutError(), True, True, False, False),  # it waits behind a swap, or dribbles: asked last all the same
        (StreamLost("connection refused"), True, False, True, False),
    ],
)
async def test_who_does_not_answer_is_asked_last_and_given_up_if_nothing_else_comes_from_it(
    failure: Exception, heard: bool, silent: bool, forgotten: bool, hung_up: bool
) -> None:
    node, members = Mock(), Mock()
    node.hears.return_value, node.member.name = heard, "me"
    context = training(node, members, phase_seconds=2.0)

    async def ask(*_: Any) -> None:
        raise failure

    proposals = proposals_of(context)
    proposals._ask = ask  # type: ignore[method-assign]
    await proposals._propose(member_record("other"))
    assert bool(proposals._order._silent) is silent
    assert (members.forget.called, node.hang_up.called) == (forgotten, hung_up)


async def test_a_boundary_without_a_partner_has_the_number_of_its_round(caplog: pytest.LogCaptureFixture) -> None:
    """The line that ends the round counts from 1; this one counted from 0."""
    caplog.set_level("INFO", logger=LOGGER)
    proposals = proposals_of(context_of(Mock(), Mock()), round=3)
    proposals._answered.clear()  # its last proposal stays open
    await proposals.ask_around()
    assert "no partner found" in caplog.text and "round=4" in caplog.text


async def test_who_answers_a_proposal_with_nonsense_is_avoided() -> None:
    """It was asked again in the same round, and its text was logged each time."""
    context = training(on_this_loop(), phase_seconds=2.0)
    proposals, (mine, theirs) = proposals_of(context), await stream_pair()
    assert theirs is not None

    async def ask(*_: Any) -> None:
        proposals._agreement.commit(mine, "other", Accept(eta=1.0), 1.0)  # it has proposed one meanwhile
        raise BadMessage("kind: Field required")

    proposals._ask = ask  # type: ignore[method-assign]
    await proposals._propose(member_record(mine.remote))
    assert context.backoff.avoided(mine.remote) and not context.backoff.welcome(mine.remote)
    assert proposals._agreement.meeting is None


async def test_a_partner_has_the_name_of_its_record_whatever_its_proposal_says() -> None:
    """Who proposed as another member and then sent what was refused: reports named the other one."""
    mine, theirs = await stream_pair()
    assert theirs is not None
    members: Any = Members(Mock(), "run", Mock())
    members.known = {mine.remote: named("mallory")}
    proposals = proposals_of(training(on_this_loop(), members, phase_seconds=10.0, steps_left=1))
    await theirs.send(Propose(name="bob", round=0, eta=1.0, phase=10.0), 5)
    await proposals.answer(mine)
    meeting = proposals._agreement.meeting
    assert meeting is not None and meeting.name == "mallory"


@pytest.mark.parametrize("asked", [False, True])
async def test_an_answer_that_comes_after_another_state_was_asked_for_leads_to_no_meeting(asked: bool) -> None:
    """The partner waited for a peer that took a state for minutes, and avoided it."""
    mine, theirs = await stream_pair()
    context = training(on_this_loop(), phase_seconds=10.0, steps_left=1)
    proposals = proposals_of(context)
    if asked:
        context.training.progress.suspend()
    proposal = Propose(name="me", round=0, eta=1.0, phase=10.0)
    proposals._consider(Accept(eta=1.0), proposal, mine, "bob")
    assert theirs is not None and (proposals._agreement.meeting is None) is asked


def nobody() -> Members:
    """A directory without records."""
    return Members(Mock(), "run", Mock())


async def answered(proposals: Proposals, remote: str, eta: float, phase: float = 10.0) -> Accept | Decline:
    """What ``remote`` is told, which proposes to meet in ``eta`` seconds."""
    mine, theirs = await stream_pair()
    mine.remote = remote
    proposals._context.node.background(proposals.answer(mine))
    await theirs.send(Propose(name=remote, round=0, eta=eta, phase=phase), 5)
    return await theirs.receive(PROPOSAL_ANSWER, 5)


@pytest.mark.parametrize(("eta", "phase"), [(1e7, 1e7), (50.0, 10.0), (10.0, 1e-6)])
async def test_a_time_far_from_ones_own_is_declined(eta: float, phase: float) -> None:
    reply = await answered(proposals_of(training(on_this_loop(), nobody(), phase_seconds=10.0)), "liar", eta, phase)
    assert isinstance(reply, Decline) and "apart" in reply.reason


async def test_of_several_proposals_one_is_a_meeting() -> None:
    proposals = proposals_of(training(on_this_loop(), nobody(), phase_seconds=10.0))
    replies = await asyncio.gather(*(answered(proposals, "liar", 10.0) for _ in range(5)))
    assert sum(isinstance(reply, Accept) for reply in replies) == 1


async def test_who_is_ready_after_its_meeting_was_given_up_is_met_no_more() -> None:
    """Else it would be a group in the next round."""
    mine, theirs = await stream_pair()
    agreement = Agreement(training(on_this_loop(), phase_seconds=10.0))
    agreement.commit(mine, "late", Accept(eta=1.0), 1.0)
    meeting: Any = agreement.meeting
    agreement.cancel(meeting)
    assert meeting.came.result() is False and agreement.meeting is None
    with pytest.raises(StreamLost):  # its word that it is ready reaches nobody
        await theirs.receive(PartnerReady, 5)


def test_members_that_were_never_met_are_asked_last_after_rounds_in_which_they_have_declined() -> None:
    """For longer each time, until one of them is met."""
    records = [member_record("met"), member_record("new")]
    members = Mock(candidates=lambda: records, live=lambda **_: records)
    proposals = proposals_of(context_of(on_this_loop(), members), round=1)
    agreement = proposals._agreement

    def new_last_after(*asked: str) -> int:
        """Rounds in which a member that was met comes first, after one in which ``asked`` have declined."""
        proposals._order._asked = dict.fromkeys(asked, 0.0)
        agreement.round += 1
        proposals._order.end_round(agreement.round - 1)
        began = agreement.round
        while proposals._candidates()[0].peer_id == "met":
            agreement.round += 1
        return agreement.round - began

    proposals.met("met")
    many = [f"x{number}" for number in range(MANY_DECLINE)]
    assert new_last_after(*many) == 0  # that round had a partner
    assert new_last_after("met", *many[1:]) == 0  # a few have meetings, as in a swarm of three
    assert [new_last_after(*many) for _ in range(6)] == [4, 8, 16, 32, 64, 64]
    proposals.met("x")
    assert new_last_after(*many) == 0
    assert new_last_after(*many) == 4


def named(name: str) -> Any:
    """What a member knows of another one."""
    return Entry(member_record(name), math.inf)


def test_a_newcomer_has_the_name_that_it_says_until_its_record_comes_but_not_that_of_another() -> None:
    """It was reported by the end of its id until the next look, for up to 15 seconds."""
    members: Any = Members(Mock(), "run", Mock())
    members.known = {"id-of-b": named("bob")}
    assert members.name_of("newcomer", "carol") == "carol"
    assert members.name_of("newcomer", "bob") == "newcomer"[-6:]
    assert members.name_of("id-of-b", "carol") == "bob"
    members.known = {}
    assert members.name_of("newcomer", "bob") == "newcomer"[-6:]  # while bob's record is away
    assert members.name_of("id-of-b", "carol") == "bob"


def test_a_partner_keeps_its_name_while_its_record_is_away() -> None:
    """After a split its records come later than itself, so it was another partner in reports and tests."""
    known = {"id-of-b": named("bob")}
    members: Any = Members(Mock(), "run", Mock())
    members.known = known
    assert members.name_of("id-of-b") == "bob"
    known.clear()
    assert members.name_of("id-of-b") == "bob"
    assert members.name_of("an-id-never-seen") == "an-id-never-seen"[-6:]
    for number in range(2 * KEPT_NAMES):
        known[str(number)] = named("n")
        members.name_of(str(number))
    assert len(members._names) == KEPT_NAMES
