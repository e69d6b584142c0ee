"""Peers of different speed: all meet one another, and with ``inner_time`` a slow one makes fewer steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.swarm.support.harness import Swarm
from tests.swarm.support.node_peer import Peer, in_threads, join_all

Pair = tuple[str, str]
Pairs = dict[Pair, float]
PACES = (0.6, 0.6, 0.8, 0.8, 1.2, 1.2)  # of STEP_SECONDS: three classes, the fastest twice as fast as the slowest


@pytest.fixture
def six(tmp_path: Path) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        peers: list[Peer] = []
        for name, pace in zip("abcdef", PACES, strict=True):
            peers.append(Peer(name, tmp_path, peers[0].node.addresses if peers else ()))
            peers[-1].pace = pace
            stack.callback(peers[-1].presence.leave)
        for peer in peers:
            peer.presence._members.refresh_all()
        yield peers


def train_for(peer: Peer, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        peer.train(1)


def by_chance(met: Pairs, pairs: set[Pair]) -> Pairs:
    """Expected meetings of each of ``pairs`` if the partners were independent, given each peer's total: e = a_i a_j."""
    names = sorted({name for pair in pairs for name in pair})
    sums = {name: sum(met[pair] for pair in pairs if name in pair) for name in names}
    weight = {name: sums[name] ** 0.5 for name in names}
    for _ in range(500):
        for name in names:
            others = [one if two == name else two for one, two in pairs if name in (one, two)]
            weight[name] = sums[name] / sum(weight[other] for other in others)
    return {(one, two): weight[one] * weight[two] for one, two in pairs}


def test_peers_of_three_speeds_all_meet_and_partners_are_random(six: list[Peer]) -> None:
    """Two peers of equal speed end a swap together and reach their next boundaries together. If both find no other
    partner, they meet again. So these three pairs have a separate bound.
    """
    join_all(in_threads(*(partial(train_for, peer, 60.0) for peer in six)), 90)
    counts = {one.name: dict(one.partners) for one in six}
    pairs = list(itertools.combinations("abcdef", 2))
    met = {(one, two): (counts[one].get(two, 0) + counts[two].get(one, 0)) / 2 for one, two in pairs}
    assert min(met.values()) >= 3, met
    assert all(sum(one.partners.values()) >= 0.6 * one.round for one in six), [(it.round, it.partners) for it in six]
    alike = {("a", "b"), ("c", "d"), ("e", "f")}
    everyone = by_chance(met, set(pairs))
    assert sum(met[pair] for pair in alike) < 2 * sum(everyone[pair] for pair in alike), met
    expected = by_chance(met, set(pairs) - alike)
    statistic = sum((met[pair] - expected[pair]) ** 2 / expected[pair] for pair in expected)
    assert statistic < 16.8, (statistic, met)  # 12 pairs with 6 sums given: the 99% quantile of 6 degrees of freedom


def test_a_slow_peer_makes_fewer_steps_in_the_same_time_and_both_end_together(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    # more steps than the fastest machine makes in this time
    sets = ("run.steps=20000", "run.inner_steps=2000", "run.inner_time=0.8", "peer.start_with=2")
    fast = swarm.peer("fast", *sets, address=address)
    slow = swarm.peer("slow", *sets, "peer.micro_batch=1", "run.batch_size=2", address=address)
    began = time.monotonic()
    for process in (fast, slow):
        assert process.exit_code(100) == 0, process.output()
    assert time.monotonic() - began < 100
    rows = {name: swarm.rounds(name) for name in ("fast", "slow")}
    assert rows["fast"][-1]["step"] == rows["slow"][-1]["step"] == 20000
    assert rows["slow"][-1]["tokens"] < rows["fast"][-1]["tokens"]
    assert sum(row["outcome"] == "merged" for row in rows["slow"]) >= 5
