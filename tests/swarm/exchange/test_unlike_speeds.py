"""Peers of different speed: with ``inner_time`` a slow one makes fewer steps (who meets whom: tests/simulated)."""

from __future__ import annotations

from tests.swarm.support.harness import Swarm


def test_a_slow_peer_makes_fewer_steps_in_the_same_time_and_both_end_together(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    # more steps than the fastest machine makes in this time
    sets = ("run.steps=20000", "run.inner_steps=2000", "run.inner_time=0.8", "peer.start_with=2")
    fast = swarm.peer("fast", *sets, address=address)
    slow = swarm.peer("slow", *sets, "peer.micro_batch=1", "run.batch_size=2", address=address)
    for process in (fast, slow):
        assert process.exit_code(100) == 0, process.output()
    rows = {name: swarm.rounds(name) for name in ("fast", "slow")}
    assert rows["fast"][-1]["step"] == rows["slow"][-1]["step"] == 20000
    assert rows["slow"][-1]["tokens"] < rows["fast"][-1]["tokens"]
    assert sum(row["outcome"] == "merged" for row in rows["slow"]) >= 5
