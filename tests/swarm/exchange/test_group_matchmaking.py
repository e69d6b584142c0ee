"""Groups of all peers on real nodes: without one that does not answer or has other weights, and a repeated round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from peer.config.schema import ExchangeConfig
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import REDUCE_PROTOCOL, IncomingStreams
from peer.rounds.contribution import Averaged, Vector
from peer.rounds.state import Lineage, State
from peer.rounds.types import Group, Grouping, Outcome
from tests.swarm.support.node_peer import Peer, in_threads, join_all

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


def test_a_member_that_first_misses_the_leader_waits_for_its_successor_to_notice(build: Build) -> None:
    """It was redirected to the dead leader twelve times at once and then had no group in any round."""
    peers = build("abc")
    join_all(in_threads(*(partial(peer.train, 1) for peer in peers)), 90)
    dead, successor, quick = peers
    dead.node.loop.call_soon_threadsafe(time.sleep, 15)  # its daemon accepts streams, but the node does not answer
    quick.presence.avoid(dead.node.peer_id, Outcome.TIMEOUT)
    join_all(in_threads(successor.meet, quick.meet), 30)
    assert [link.name for link in quick.groups[-1].links] == [successor.name], quick.groups[-1].lost
    assert [link.name for link in successor.groups[-1].links] == [quick.name]


def test_a_peer_with_other_weights_is_sent_to_a_member_with_the_groups_weights(build: Build) -> None:
    peers = build("abc", equal=True, snapshot=lambda: State(40, 4, [torch.arange(NUMEL).float()], RIGHT, 3))
    for peer, lineage in zip(peers, (WRONG, RIGHT, RIGHT), strict=True):
        peer.lineage = lineage
    threads = in_threads(*(partial(arrive, peer) for peer in peers[1:]))
    stray = peers[0]  # it leads the group, and its own weights are old
    group = arrive(stray)
    assert group.donor is not None and group.donor.name in (peers[1].name, peers[2].name)
    state = stray.presence.state_of(group.donor, [torch.empty(NUMEL)])
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
        self.exchange = AllReduceExchange(network=peer.node, incoming=incoming, numel=NUMEL, settings=settings)
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
