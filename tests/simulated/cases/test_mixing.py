"""Who meets whom: all meet, and partners are as random as the speeds allow."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.simulated.scenario import Machine, Scenario
from tests.simulated.world import World, in_a_folder

Pair = tuple[str, str]
STEPS = (0.06, 0.06, 0.08, 0.08, 0.12, 0.12)  # seconds: three classes, the fastest twice as fast as the slowest
ALIKE = {("peer0", "peer1"), ("peer2", "peer3"), ("peer4", "peer5")}


def meetings(world: World) -> dict[Pair, float]:
    """Swaps of each two peers."""
    counted: Counter[Pair] = Counter()
    for peer in world.peers:
        for row in world.rounds(peer):
            if row["partner"]:
                counted[min(peer.name, row["partner"]), max(peer.name, row["partner"])] += 1
    return {pair: counted[pair] / 2 for pair in itertools.combinations([it.name for it in world.peers], 2)}


def by_chance(met: dict[Pair, float], pairs: set[Pair]) -> dict[Pair, float]:
    """Expected meetings of each of ``pairs`` if the partners were independent, given each peer's total: e = a_i a_j."""
    names = sorted({name for pair in pairs for name in pair})
    sums = {name: sum(met[pair] for pair in pairs if name in pair) for name in names}
    weight = {name: sums[name] ** 0.5 for name in names}
    for _ in range(500):
        for name in names:
            others = [one if two == name else two for one, two in pairs if name in (one, two)]
            weight[name] = sums[name] / sum(weight[other] for other in others)
    return {(one, two): weight[one] * weight[two] for one, two in pairs}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_peers_of_three_speeds_all_meet_and_partners_are_random(kind: str) -> None:
    """Two peers of equal speed end a swap together and reach their next boundaries together. If both find no other
    partner, they meet again. So these three pairs have a separate bound.
    """
    machines = tuple(Machine(step, 0.005, up=1e7, down=1e7, skew=0.0, starts=0.0) for step in STEPS)
    six = Scenario(0, kind, machines, (), 240.0, inner_steps=10, numel=300, codec="none")  # type: ignore[arg-type]
    with in_a_folder(six) as world:
        world.run()
        met = meetings(world)
        rows = [row for peer in world.peers for row in world.rounds(peer)]
    assert min(met.values()) >= 14, met  # of the fastest and the slowest; 17 to 29 in two dozen worlds
    assert sum(row["outcome"] == "merged" for row in rows) >= 0.6 * len(rows)
    everyone = by_chance(met, set(met))
    assert sum(met[pair] for pair in ALIKE) < 2 * sum(everyone[pair] for pair in ALIKE), met
    expected = by_chance(met, set(met) - ALIKE)
    statistic = sum((met[pair] - expected[pair]) ** 2 / expected[pair] for pair in expected)
    assert statistic < 16.8, (statistic, met)  # 12 pairs with 6 sums given: the 99% quantile of 6 degrees of freedom
