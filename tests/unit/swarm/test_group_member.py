"""A member that asks for a seat in a group: whom it asks next when the leader does not take it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import clock
from peer.p2p.stream import Stream, StreamLost
from peer.rounds import types as rounds
from peer.rounds.backoff import PeerBackoff, Proven
from peer.rounds.contribution import Averaged
from peer.rounds.state import Lineage
from peer.rounds.types import Outcome, Seat
from peer.swarm.context import Decline
from peer.swarm.grouping.known_members import KnownMembers
from peer.swarm.grouping.matchmaking import GroupMatchmaking
from peer.swarm.grouping.member import MOST_MESSAGES, GroupMember, LeaderStream
from peer.swarm.grouping.messages import (
    AWAY,
    GROUP_CALL,
    UNWELCOME,
    Admitted,
    JoinGroup,
    MemberReady,
    OtherLeader,
    Roster,
    WaitFor,
)
from tests.unit.virtual import stream_pair


class Group:
    """A member that knows the leader A, and B, which leads without it. A declines with ``reason``, or admits it and
    leaves it after so many seconds, with its ``last`` message. It names leaders that do not exist to whom it
    ``redirects``.
    """

    def __init__(
        self, reason: str = "", seconds: int = 0, last: OtherLeader | Roster | None = None, *, redirects: bool = False
    ) -> None:
        self.reason, self.asked, self.seconds = reason, [], seconds  # type: tuple[str, list[str], int]
        self.last, self.redirects = last, redirects
        self.answers: list[asyncio.Task[None]] = []
        node = SimpleNamespace(
            peer_id="Z",
            proven=Proven(),
            addresses=(),
            member=SimpleNamespace(name="z"),
            open_to_member=self.open_to_member,
            background=lambda work: self.answers.append(asyncio.ensure_future(work)),
        )
        boundary = SimpleNamespace(
            here=True, progress=SimpleNamespace(phase_seconds=2.0), eta=lambda: 1.0, longest_phase_seconds=2.0
        )
        members, backoff = SimpleNamespace(live=lambda: []), PeerBackoff()
        context: Any = SimpleNamespace(
            node=node,
            members=members,
            backoff=backoff,
            boundary=boundary,
            counters=SimpleNamespace(lineage=Lineage("x", 9)),
            away=False,
        )
        self.context = context
        self.known = KnownMembers(context, 600.0)
        for peer_id in "AB":
            self.known.learn(Seat(peer_id, peer_id.lower()))
        self.member = GroupMember(context, self.known)

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Any) -> Stream:
        self.asked.append(peer_id)
        if peer_id not in "AB":
            raise StreamLost("no addresses")
        theirs, ours = await stream_pair()
        self.answers.append(asyncio.ensure_future(self._answer(theirs)))
        return ours

    async def _answer(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(GROUP_CALL, 5), JoinGroup)
        if self.redirects:
            await stream.send_last(OtherLeader(seat=Seat(f"nobody{len(self.asked)}", "nobody")), 5)
            return
        if self.reason:
            await stream.send_last(Decline(reason=self.reason), 5)
            return
        await stream.send(Admitted(), 5)
        assert isinstance(await stream.receive(MemberReady, 5), MemberReady)
        for left in reversed(range(self.seconds)):
            await asyncio.sleep(1.0)
            await stream.send(WaitFor(seconds=left, names="nobody"), 5)
        if self.last is not None:
            await stream.send(self.last, 5)
        stream.close()

    def leader(self) -> str:
        seat = self.known.leader()
        return "Z" if seat is None else seat.peer_id


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        (AWAY, "B"),  # before the record of A says so, and its round is not lost
        (UNWELCOME, "B"),
        ("came too late for this round", "A"),
    ],
)
async def test_a_leader_that_is_away_or_will_not_have_it_leads_it_no_longer(reason: str, then: str) -> None:
    group = Group(reason)
    leader = group.known.leader()
    assert leader is not None and leader.peer_id == "A"
    assert reason in await group.member.join(leader, 3)
    await asyncio.gather(*group.answers)
    assert group.asked == ["A"] and group.leader() == then


@pytest.mark.parametrize(("reason", "redirects"), [("the group is full", False), ("", True)])
async def test_a_leader_that_lets_a_member_in_at_no_boundary_leads_it_no_longer(reason: str, redirects: bool) -> None:
    """The one with the smallest id kept all members from meeting, for ever. Once, it may be true."""
    group = Group(reason, redirects=redirects)
    matchmaking = GroupMatchmaking(group.context, 600.0, equal=True)
    group.known = matchmaking._known
    group.known.leadership.established = True
    for leader in "AAB":
        for peer_id in "AB":
            group.known.learn(Seat(peer_id, peer_id.lower()), 1000.0)
            group.context.node.proven.add(peer_id)
        assert group.leader() == leader
        found = await matchmaking._found(clock.monotonic() + 60.0)
        assert found.lost and found.assembly is None
        matchmaking.ended(found, Averaged(torch.zeros(1), Outcome.TIMEOUT, detail=found.lost))
    for answer in group.answers:
        answer.cancel()


def test_who_has_made_a_round_fail_does_not_lead_its_repetition() -> None:
    group = Group()
    matchmaking = GroupMatchmaking(group.context, 600.0, equal=True)
    for peer_id in "AB":
        matchmaking._known.learn(Seat(peer_id, peer_id.lower()))
    matchmaking.avoid("A", offence=False)
    leader = matchmaking._known.leader()
    assert leader is not None and leader.peer_id == "B"


OTHER_LEADER = OtherLeader(seat=Seat("nobody", "nobody"))
NOT_OURS = Roster(token="x", members=[Seat("A", "a"), Seat("B", "b")], round=3, phase=1.0)


@pytest.mark.parametrize("last", [None, OTHER_LEADER, NOT_OURS])
@pytest.mark.parametrize(("seconds", "left_out"), [(2, 30.0), (60, 240.0)])
async def test_a_leader_that_ends_just_before_its_deadline_has_cost_as_much_as_one_that_forms_no_group(
    seconds: int, left_out: float, last: OtherLeader | Roster | None
) -> None:
    group = Group(seconds=seconds, last=last)
    leader = group.known.leader()
    assert leader is not None and 60 < group.known.longest("A") < 120
    found = await group.member.follow(leader, 3, clock.monotonic() + 600.0)
    assert isinstance(found, str) and ("is gone" in found) == (last is None)
    if last is not None and seconds == 2:  # members do not always agree at once on who leads
        assert not group.known._backoff.avoided("A")
        return
    held = group.known._backoff._held["A"]
    assert held.until - clock.monotonic() == pytest.approx(left_out, abs=5.0)
    assert held.firm == (seconds == 60)


async def test_who_is_asked_to_stop_leaves_a_leader_that_waits_for_others() -> None:
    """It waited with the leader for up to ten minutes, and was killed before it had saved."""
    group = Group(seconds=60)
    leader = group.known.leader()
    assert leader is not None
    asyncio.get_running_loop().call_later(5.0, lambda: setattr(group.context, "away", True))
    began = clock.monotonic()
    found = await group.member.follow(leader, 3, clock.monotonic() + 600.0)
    assert isinstance(found, rounds.Group) and found.lost == "asked to stop"
    assert 10.0 < clock.monotonic() - began < 18.0
    assert not group.member.admitted_by(leader) and not group.known._backoff.avoided("A")
    for answer in group.answers:
        answer.cancel()


async def test_who_takes_another_state_leaves_its_leader() -> None:
    """It was waited for, by the time that the replaced state had announced."""
    group = Group()
    leader = group.known.leader()
    assert leader is not None and await group.member.join(leader, 3) == ""
    group.context.node.spawn = group.context.node.background
    matchmaking = GroupMatchmaking(group.context, 600.0, equal=True)
    matchmaking._member = group.member
    matchmaking.call_off("another state replaces this one")
    await asyncio.wait(group.answers, timeout=5)
    assert not group.member.admitted_by(leader)
    await asyncio.wait(group.answers, timeout=5)
    assert [str(it.exception()) for it in group.answers if it.exception()] == ["the stream ended"]  # the leader's
    group.context.boundary.eta, group.context.boundary.progress.step_seconds = lambda: None, 1.0
    await group.member.join(leader, 3)  # which was under way
    assert not group.member.admitted_by(leader)
    call = JoinGroup(seat=Seat("B", "b"), round=3, eta=1.0)
    assert matchmaking._reply(call, "B") == Decline(reason=AWAY)  # as a leader


async def test_a_leader_that_floods_is_left() -> None:
    """Its messages are read at the boundary, and until then they are kept."""
    group = Group(seconds=0)
    group.member._boundary.here = False
    theirs, ours = await stream_pair()
    current = LeaderStream(ours, Seat("A", "a"))
    group.member._leader = current
    hearing = asyncio.ensure_future(group.member._hear(current))
    for _ in range(MOST_MESSAGES + 20):
        await theirs.send(WaitFor(seconds=1.0, names="x"), 5)
    await hearing
    assert current.messages.qsize() == MOST_MESSAGES + 1 and group.member._leader is None
