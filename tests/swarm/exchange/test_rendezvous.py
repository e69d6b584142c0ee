"""Pairs on real nodes; the inner steps are sleeps, so that many rounds fit into a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.swarm.support.node_peer import STEP_SECONDS, STEPS, Peer, join_all, train_all


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        peers: list[Peer] = []
        for name in "abcd":
            peers.append(Peer(name, tmp_path, peers[0].node.addresses if peers else ()))
            stack.callback(peers[-1].presence.leave)
        for peer in peers:
            peer.presence._members.refresh_all()
        yield peers


def test_partners_change_and_few_peers_wait_or_stay_alone(four: list[Peer]) -> None:
    join_all(train_all(four, 14))
    met = {peer.name: dict(peer.partners) for peer in four}
    assert all(len(peer.partners) >= 2 for peer in four), met
    assert sum(sum(peer.partners.values()) for peer in four) >= 0.75 * 14 * 4, met
    waits = sorted(wait for peer in four for wait in peer.waits)
    assert waits[len(waits) // 2] < 0.3 * STEPS * STEP_SECONDS, waits
    for one in four:  # a meeting has two sides
        for other in four:
            assert abs(one.partners[other.name] - other.partners[one.name]) <= 1, met


def test_a_partner_that_dies_before_the_boundary_costs_little(four: list[Peer]) -> None:
    *others, victim = four
    threads = train_all(four, 8)
    time.sleep(3.5)
    victim.stop.request()
    victim.node.kill()  # like a crash: the record stays in the directory
    join_all(threads[:3])
    for peer in others:
        assert peer.round == 8
        assert max(peer.waits) < 6.0, peer.waits
        assert sum(peer.partners.values()) >= 4, peer.partners
