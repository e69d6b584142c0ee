"""How much a swarm sends for itself: everything but parts of tensors."""

from __future__ import annotations

import pytest

from tests.simulated.scenario import Machine, Scenario
from tests.simulated.world import World, in_a_folder

MB_A_MINUTE = {16: 0.25, 24: 0.3}  # of one peer, at most; real records are longer, and the goal is 0.5
MEASURED = range(150, 210)  # seconds


@pytest.mark.parametrize("members", MB_A_MINUTE)
def test_a_peers_own_traffic_is_bounded_and_each_sees_all_others_at_all_times(members: int) -> None:
    """It was 3.7 MB among 16 real peers: each look and each write got all records from eight nodes."""
    machine = Machine(step_seconds=1.5, latency=0.01, up=1e7, down=1e7, skew=0.0, starts=0.0)
    scenario = Scenario(0, "overlapped", (machine,) * members, (), 220.0, inner_steps=10, numel=300, codec="none")
    sent: list[int] = []
    seen: set[int] = set()

    def look(world: World) -> None:
        sent.append(world.network.sent.total() - world.network.sent["parts"])
        trainers = [peer.trainer for peer in world.peers]
        seen.update(trainer.member.presence.size if trainer is not None else 0 for trainer in trainers)

    with in_a_folder(scenario) as world:
        for second in MEASURED:
            world.loop.call_later(second, look, world)
        report = world.run()
    assert not report.violations and report.merges > 2 * members
    assert seen == {members}
    assert 0.05 < (sent[-1] - sent[0]) / len(MEASURED) * 60 / members / 1e6 < MB_A_MINUTE[members], world.network.sent
