"""A member that asks for a seat in a group: whom it asks next when the leader does not take it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer.p2p.budgets import Proven
from peer.p2p.stream import Stream
from peer.rounds.backoff import PeerBackoff
from peer.rounds.types import Seat
from peer.swarm.context import Decline
from peer.swarm.grouping.member import GroupMember
from peer.swarm.grouping.messages import AWAY, GROUP_CALL, UNWELCOME, JoinGroup
from peer.swarm.grouping.roster import KnownMembers
from tests.unit.virtual import run, stream_pair


class Group:
    """A member that knows the leader A, and B, which leads without it. A declines with ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, []  # type: tuple[str, list[str]]
        self.answers: list[asyncio.Task[None]] = []
        node = SimpleNamespace(
            peer_id="Z",
            proven=Proven(),
            addresses=(),
            member=SimpleNamespace(name="z"),
            open_to_member=self.open_to_member,
        )
        boundary = SimpleNamespace(progress=SimpleNamespace(phase_seconds=2.0), eta=lambda: 1.0)
        members, backoff = SimpleNamespace(live=lambda: []), PeerBackoff()
        context: Any = SimpleNamespace(
            node=node, members=members, others=lambda: [], backoff=backoff, boundary=boundary, counters=None
        )
        self.known = KnownMembers(context, 600.0)
        for peer_id in "AB":
            self.known.learn(Seat(peer_id, peer_id.lower()))
        self.member = GroupMember(context, self.known)

    async def open_to_member(self, peer_id: str, protocol: str, addresses: Any) -> Stream:
        theirs, ours = await stream_pair()
        self.asked.append(peer_id)
        self.answers.append(asyncio.ensure_future(self._answer(theirs)))
        return ours

    async def _answer(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(GROUP_CALL, 5), JoinGroup)
        await stream.send_last(Decline(reason=self.reason), 5)

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
def test_a_leader_that_is_away_or_will_not_have_it_leads_it_no_longer(reason: str, then: str) -> None:
    async def scene() -> None:
        group = Group(reason)
        leader = group.known.leader()
        assert leader is not None and leader.peer_id == "A"
        assert reason in await group.member.join(leader, 3)
        await asyncio.gather(*group.answers)
        assert group.asked == ["A"] and group.leader() == then

    run(scene())
