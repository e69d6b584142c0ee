"""A hostile peer of the same run that sends a false time, proposes twice or comes late, against real nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from peer.p2p import identity
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream
from peer.swarm.context import Decline
from peer.swarm.pairing.agreement import PROPOSAL_ANSWER, Accept, PartnerReady, Propose
from peer.swarm.pairing.proposals import MEET_PROTOCOL
from tests.swarm.support.node_peer import STEP_SECONDS, STEPS, Peer, in_threads, join_all

PHASE = STEPS * STEP_SECONDS


class HostilePeer:
    """Knows the run and sends arbitrary proposals."""

    def __init__(self, folder: Path, victim: Peer) -> None:
        key = folder / "hostile.key"
        identity.load_or_create(key)
        member = MemberIdentity("liar", "test", "c", "{}", "layout")
        self.node = MemberNode(NodeSettings(key, "127.0.0.1", 0, initial_peers=victim.node.addresses), None, member)
        self.node.start()
        self._victim = victim
        self._streams: list[Stream] = []  # kept: Python closes what nobody holds, and the victim would be free

    async def propose(self, eta: float, phase_seconds: float = PHASE) -> tuple[Accept | Decline, asyncio.StreamWriter]:
        stream = await self.node.open_to_member(self._victim.node.peer_id, MEET_PROTOCOL)
        self._streams.append(stream)
        await stream.send(Propose(name="hostile", round=0, eta=eta, phase=phase_seconds), 5)
        return await stream.receive(PROPOSAL_ANSWER, 5), stream.writer

    def propose_now(self, eta: float, phase_seconds: float = PHASE) -> Accept | Decline:
        return self.node.call(self.propose(eta, phase_seconds), 15)[0]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Peer, HostilePeer]]:
    with ExitStack() as stack:
        victim = Peer("victim", tmp_path, ())
        stack.callback(victim.presence.leave)
        hostile = HostilePeer(tmp_path, victim)
        stack.callback(hostile.node.stop)
        yield victim, hostile


def begin(victim: Peer, rounds: int) -> Thread:
    """Start training; returns when the victim knows the time of its boundary."""
    (thread,) = in_threads(lambda: victim.train(rounds))
    until = time.monotonic() + 10
    while victim.progress.eta() is None and time.monotonic() < until:
        time.sleep(0.01)
    return thread


def test_a_time_far_from_the_victims_own_is_declined(two: tuple[Peer, HostilePeer]) -> None:
    victim, hostile = two
    thread = begin(victim, 3)
    for eta, phase_seconds in ((1e7, 1e7), (5 * PHASE, PHASE), (PHASE, 1e-6)):
        reply = hostile.propose_now(eta, phase_seconds)
        assert isinstance(reply, Decline) and "apart" in reply.reason, reply
    join_all([thread], 60)


def test_two_proposals_make_one_meeting(two: tuple[Peer, HostilePeer]) -> None:
    victim, hostile = two
    thread = begin(victim, 3)

    async def both() -> list[Accept | Decline]:
        eta = victim.progress.eta() or 0.0
        return [reply for reply, _ in await asyncio.gather(*(hostile.propose(eta) for _ in range(5)))]

    replies = hostile.node.call(both(), 20)
    assert sum(isinstance(reply, Accept) for reply in replies) == 1, replies
    join_all([thread], 60)


def test_a_peer_that_comes_after_the_deadline_gets_no_group(two: tuple[Peer, HostilePeer]) -> None:
    """A ready message for a cancelled meeting must not form a group in the next round."""
    victim, hostile = two
    thread = begin(victim, 4)
    reply, writer = hostile.node.call(hostile.propose(victim.progress.eta() or 0.0), 15)
    assert isinstance(reply, Accept)
    until = time.monotonic() + 20
    while victim.round == 0 and time.monotonic() < until:
        time.sleep(0.02)

    async def late() -> None:
        body = PartnerReady().model_dump_json().encode()
        writer.write(len(body).to_bytes(4, "big") + body)

    hostile.node.call(late(), 5)
    join_all([thread], 60)
    assert victim.round == 4 and not victim.partners
