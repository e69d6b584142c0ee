"""Peers of unlike speed: everybody meets everybody, and with ``inner_time`` a slow one does fewer steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.swarm.harness import Swarm
from tests.swarm.node_peer import Peer, in_threads, join_all

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


def by_chance(meetings: dict[str, int]) -> dict[tuple[str, str], float]:
    """How often each two meet if only how often each one meets somebody decides: e = a_i a_j, with the given sums."""
    names = sorted(meetings)
    weight = {name: meetings[name] ** 0.5 for name in names}
    for _ in range(200):
        for name in names:
            weight[name] = meetings[name] / sum(weight[other] for other in names if other != name)
    return {(one, two): weight[one] * weight[two] for one, two in itertools.combinations(names, 2)}


def test_peers_of_three_speeds_all_meet_and_whom_is_left_to_chance(six: list[Peer]) -> None:
    join_all(in_threads(*(partial(train_for, peer, 60.0) for peer in six)), 90)
    met = {one.name: dict(one.partners) for one in six}
    expected = by_chance({one.name: sum(one.partners.values()) for one in six})
    observed = {(one, two): (met[one].get(two, 0) + met[two].get(one, 0)) / 2 for one, two in expected}
    statistic = sum((observed[pair] - expected[pair]) ** 2 / expected[pair] for pair in expected)
    assert min(observed.values()) >= 3, met
    assert all(sum(one.partners.values()) >= 0.6 * one.round for one in six), [(it.round, it.partners) for it in six]
    # 15 pairs with 6 sums given: 9 degrees of freedom, of which this is the 99% quantile
    assert statistic < 21.7, (statistic, met)


def test_a_slow_peer_does_fewer_steps_in_the_same_time_and_both_end_together(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    sets = ("run.steps=2000", "run.inner_steps=200", "run.inner_time=0.8", "peer.start_with=2")
    fast = swarm.peer("fast", *sets, address=address)
    slow = swarm.peer("slow", *sets, "peer.micro_batch=1", "run.batch_size=2", address=address)
    began = time.monotonic()
    for process in (fast, slow):
        assert process.exit_code(100) == 0, process.output()
    assert time.monotonic() - began < 100
    rows = {name: swarm.rounds(name) for name in ("fast", "slow")}
    assert rows["fast"][-1]["step"] == rows["slow"][-1]["step"] == 2000
    assert rows["slow"][-1]["tokens"] < rows["fast"][-1]["tokens"]
    assert sum(row["outcome"] == "merged" for row in rows["slow"]) >= 5
