"""A group of all peers on real nodes, without a leader that does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from peer.rounds.types import Grouping, Outcome
from tests.swarm.support.node_peer import Peer, in_threads, join_all


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Peer]]:
    """In the order of their ids, so that the first one leads."""
    with ExitStack() as stack:
        made: list[Peer] = []
        for name in "abc":
            made.append(Peer(name, tmp_path, made[0].node.addresses if made else (), grouping=Grouping.EVERYONE))
            stack.callback(made[-1].presence.leave)
        for peer in made:
            peer.presence._members.refresh_all()
        yield sorted(made, key=lambda peer: peer.node.peer_id)


def test_a_member_that_first_misses_the_leader_waits_for_its_successor_to_notice(peers: list[Peer]) -> None:
    """It was redirected to the dead leader twelve times at once and then had no group in any round."""
    join_all(in_threads(*(partial(peer.train, 1) for peer in peers)), 90)
    dead, successor, quick = peers
    dead.node.loop.call_soon_threadsafe(time.sleep, 15)  # its daemon accepts streams, but the node does not answer
    quick.presence.avoid(dead.node.peer_id, Outcome.TIMEOUT)
    join_all(in_threads(successor.meet, quick.meet), 30)
    assert [link.name for link in quick.groups[-1].links] == [successor.name], quick.groups[-1].lost
    assert [link.name for link in successor.groups[-1].links] == [quick.name]
