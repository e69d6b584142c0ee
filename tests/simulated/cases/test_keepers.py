"""Who owns the nodes that are nearest to a key of the directory hides nobody of a small swarm."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from peer.swarm.directory import records
from peer.swarm.directory.buckets import Bucket
from peer.swarm.directory.reader import Onlooker
from tests.simulated.harm.keepers import surround
from tests.simulated.scenario import Machine, Scenario
from tests.simulated.world import World, in_a_folder

MEMBERS, NEWCOMER = 8, 60.0  # when the last member starts, in seconds
LOOKS = range(90, 130, 2)  # seconds: nodes that are slow on purpose make joining slow
KEYS = ("simulated/members/0/0", records.RUNS)
MACHINE = Machine(step_seconds=1.5, latency=0.01, up=1e7, down=1e7, skew=0.0, starts=0.0)


@pytest.mark.parametrize("latency", [0.01, 0.94])
def test_five_nodes_that_keep_nothing_hide_nobody(latency: float) -> None:
    """A hundred ids of an attacker had been enough for a swarm of twenty: a newcomer was alone with fresh weights. With
    the larger ``latency`` they answer just in time, so that a look has no time left.
    """
    assert records.members_key("simulated", Bucket(0, 0)) == KEYS[0]
    machines = (MACHINE,) * (MEMBERS - 1) + (replace(MACHINE, starts=NEWCOMER),)
    scenario = Scenario(0, "blocking", machines, (), 140.0, inner_steps=5, numel=300, codec="none")
    seen: defaultdict[str, set[int]] = defaultdict(set)
    runs: list[dict[str, int]] = []

    def look(world: World) -> None:
        for peer in world.peers:
            assert peer.trainer is not None
            seen[peer.name].add(peer.trainer.member.presence.size)

    async def watch(onlooker: Onlooker) -> None:
        runs.append({run: len(entries) for run, entries in (await onlooker.look()).items()})

    def ask(world: World) -> None:
        assert world.bootstrap_node is not None
        world.loop.create_task(watch(Onlooker(world.bootstrap_node)))

    with in_a_folder(scenario) as world:
        for key in KEYS:
            surround(world, key, at=20.0, latency=latency)
        for second in LOOKS:
            world.loop.call_later(second, look, world)
            world.loop.call_later(second, ask, world)
        report = world.run()
        last = world.rounds(world.peers[-1])
    assert not report.violations
    assert dict(seen) == {f"peer{number}": {MEMBERS} for number in range(MEMBERS)}
    assert [row["outcome"] for row in last].count("merged") > len(last) / 2
    assert runs == [{"simulated": MEMBERS}] * len(LOOKS)
