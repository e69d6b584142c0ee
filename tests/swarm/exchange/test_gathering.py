"""Groups of all peers on real nodes: their members, the wait for slow ones, the redirect of one with other weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from peer.config.schema import ExchangeConfig, RendezvousConfig
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import REDUCE_PROTOCOL, IncomingStreams
from peer.rounds.contribution import Averaged, Vector
from peer.rounds.state import Lineage, State
from peer.rounds.types import Group, Grouping, Outcome
from peer.swarm.grouping import leader, member
from tests.swarm.support.node_peer import STEP_SECONDS, STEPS, Peer, in_threads, join_all, train_all

PHASE = STEPS * STEP_SECONDS
NUMEL = 1000
RIGHT, WRONG = Lineage("right", 9), Lineage("wrong", 7)
Build = Callable[..., list[Peer]]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """``build("abc", equal=True)``: peers in the order of their ids, so that the first one leads."""
    with ExitStack() as stack:

        def make(names: str, **options: object) -> list[Peer]:
            peers: list[Peer] = []
            for name in names:
                initial = peers[0].node.addresses if peers else ()
                peers.append(Peer(name, tmp_path, initial, grouping=Grouping.EVERYONE, **options))  # type: ignore[arg-type]
                stack.callback(peers[-1].presence.leave)
            for peer in peers:
                peer.presence._members.refresh_all()
            return sorted(peers, key=lambda peer: peer.node.peer_id)

        yield make


def arrive(peer: Peer) -> Group:
    """Make an inner phase; the group at its end."""
    peer.inner_phase()
    return peer.meet()


def test_every_group_has_all_peers_though_one_is_slower(build: Build) -> None:
    peers = build("abcd")
    peers[2].pace = 1.6
    join_all(train_all(peers, 6))
    for peer in peers:
        met = [len(group.links) for group in peer.groups]
        assert met[1:] == [3] * 5, (peer.name, [(group.lost, len(group.links)) for group in peer.groups])
    for number in range(1, 6):
        assert len({peer.groups[number].assembly.token for peer in peers}) == 1  # type: ignore[union-attr]
    for fast in (peers[0], peers[1], peers[3]):  # they wait for the slow one, and no longer
        assert 0.2 * PHASE < sorted(fast.waits)[len(fast.waits) // 2] < 1.5 * PHASE
    assert sorted(peers[2].waits)[3] < 0.5 * PHASE


def test_members_wait_for_a_leader_that_is_slower_than_the_silence_limit(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keep-alive messages it was dropped after 20 s of silence, and the others averaged without it."""
    monkeypatch.setattr(member, "LEADER_SILENCE", 1.0)
    monkeypatch.setattr(leader, "KEEP_ALIVE", 0.2)
    peers = build("abc")
    peers[0].pace = 5.0  # 4 s after the others
    join_all(train_all(peers, 2))
    for peer in peers:
        assert [len(group.links) for group in peer.groups] == [2, 2], [group.lost for group in peer.groups]
    assert max(peers[0].waits) < PHASE


@pytest.mark.parametrize("place", [0, 2])
def test_the_death_of_a_member_is_noticed_at_once(build: Build, place: int) -> None:
    peers = build("abc")
    victim = peers.pop(place)
    threads = train_all([*peers, victim], 7)
    time.sleep(3.5 * PHASE)
    victim.stop.request()
    victim.node.kill()  # like a crash: the record stays in the directory
    join_all(threads[:2])
    for peer in peers:
        assert peer.round == 7
        assert max(peer.waits) < 6.0, peer.waits
        assert [len(group.links) for group in peer.groups[-2:]] == [1, 1], [group.lost for group in peer.groups]


def test_a_member_that_first_misses_the_leader_waits_for_its_successor_to_notice(build: Build) -> None:
    """It was redirected to the dead leader twelve times at once and then had no group in any round."""
    peers = build("abc")
    join_all(train_all(peers, 1))
    dead, successor, quick = peers
    dead.node.loop.call_soon_threadsafe(time.sleep, 15)  # its daemon accepts streams, but the node does not answer
    quick.presence.avoid(dead.node.peer_id, Outcome.TIMEOUT)
    join_all(in_threads(successor.meet, quick.meet), 30)
    assert [link.name for link in quick.groups[-1].links] == [successor.name], quick.groups[-1].lost
    assert [link.name for link in successor.groups[-1].links] == [quick.name]


def test_no_peer_is_waited_for_longer_than_the_patience(build: Build) -> None:
    peers = build("abc", settings=RendezvousConfig(patience=2.0))
    peers[2].pace = 30.0  # it takes part, but it is too late
    slow = in_threads(peers[2].inner_phase)
    join_all(in_threads(*(partial(arrive, peer) for peer in peers[:2])), 20)
    for peer in peers[:2]:
        assert peer.waits[0] < 2.0 + 3.0
        assert [link.name for link in peer.groups[0].links] == [peers[1 - peers.index(peer)].name]
    peers[2].stop.request()
    join_all(slow)


def test_a_peer_with_other_weights_is_sent_to_a_member_with_the_groups_weights(build: Build) -> None:
    peers = build("abc", equal=True, snapshot=lambda: State(40, 4, [torch.arange(NUMEL).float()], RIGHT, 3))
    for peer, lineage in zip(peers, (WRONG, RIGHT, RIGHT), strict=True):
        peer.lineage = lineage
    threads = in_threads(*(partial(arrive, peer) for peer in peers[1:]))
    stray = peers[0]  # it leads the group, and its own weights are old
    group = arrive(stray)
    assert group.behind is not None and group.behind.name in (peers[1].name, peers[2].name)
    state = stray.presence.state_of(group.behind, [torch.empty(NUMEL)])
    assert state is not None
    assert (state.lineage, state.round, state.phase_steps_done) == (RIGHT, 4, 3)
    assert torch.equal(state.vectors[0], torch.arange(NUMEL).float())
    stray.lineage = state.lineage
    assert len(stray.meet().links) == 2
    join_all(threads)
    assert all(len(peer.groups[-1].links) == 2 for peer in peers)


class Averaging:
    """A peer that averages as the trainer does: it repeats a failed round once without the culprit."""

    def __init__(self, peer: Peer, value: float) -> None:
        incoming = IncomingStreams()
        peer.node.call(peer.node.serve_members(REDUCE_PROTOCOL, incoming.accept), 10)
        self.peer, self.vector = peer, torch.full((NUMEL,), value)
        settings = ExchangeConfig(codec="none", stall=2.0, max_norm_ratio=1e9)
        self.exchange = AllReduceExchange(peer.node, incoming, NUMEL, settings)
        self.results: list[Averaged] = []

    def train(self) -> None:
        self.peer.inner_phase()
        self.round()

    def round(self) -> None:
        for _ in range(2):
            averaged = self.exchange.average(Vector(self.vector), self.peer.meet())
            self.results.append(averaged)
            self.peer.presence.ended(averaged)
            if averaged.culprits[:1] in ((), (self.peer.node.peer_id,)):
                return


@pytest.mark.parametrize("place", [0, 2])
def test_a_round_that_fails_by_a_member_is_repeated_without_it(build: Build, place: int) -> None:
    peers = build("abc")
    silent = peers[place]
    works = [Averaging(peer, float(index)) for index, peer in enumerate(peers) if peer is not silent]
    held: list[Group] = []
    # the silent peer comes and sends nothing
    threads = in_threads(lambda: held.append(arrive(silent)), *(work.train for work in works))
    join_all(threads, 60)
    assert len(held[0].links) == 2
    for work in works:
        first, second = work.results
        assert (first.outcome, first.culprits[0]) == (Outcome.TIMEOUT, silent.node.peer_id), first.detail
        assert second.outcome is Outcome.MERGED, second.detail
        assert torch.allclose(second.mean, torch.stack([it.vector for it in works]).mean(0))
    assert works[0].results[1].digest == works[1].results[1].digest
    silent.part(held[0])


def test_a_single_peer_does_not_wait(build: Build) -> None:
    (peer,) = build("a")
    peer.inner_phase()
    group = peer.meet()
    assert (group.links, group.lost) == ((), "")
    assert peer.waits[0] < 1.0
