"""A swarm that restarts from its checkpoints continues from the newest one."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from tests.swarm.support.harness import Swarm, wait_for

NOLOCO = ("run.inner_steps=100", "peer.checkpoint.every_rounds=1")
DILOCO = (*NOLOCO, "run.inner_steps=20", "run.outer={name: diloco, momentum: 0.5}", "run.exchange.stall=3")

NAMES = ("old", "elder", "last")


@pytest.mark.parametrize("sets", [NOLOCO, DILOCO], ids=["noloco", "diloco"])
def test_a_whole_swarm_that_was_killed_continues_from_its_newest_state(swarm: Swarm, sets: tuple[str, ...]) -> None:
    """Even if most peers have an older one, because they were away for long."""
    _, address = swarm.bootstrap()
    sets = (*sets, "run.steps=1000000", "peer.start_with=3", "peer.start_patience=120")
    peers = {name: swarm.peer(name, *sets, address=address) for name in NAMES}
    for name in ("old", "elder"):
        swarm.wait_for_rounds(name, 2)
        peers[name].signal(signal.SIGKILL)
        peers[name].exit_code(10)
    left = max(swarm.rounds(name)[-1]["round"] for name in ("old", "elder"))
    swarm.wait_for_rounds("last", left + 25)
    peers["last"].signal(signal.SIGKILL)
    peers["last"].exit_code(10)
    newest = swarm.rounds("last")[-1]["round"]
    assert newest >= left + 20

    counts = {name: len(swarm.rounds(name)) for name in NAMES}
    again = {name: swarm.start(f"{name}-again", swarm.train(name, *sets, address=address)) for name in NAMES}
    for name in NAMES:
        again[name].line(r"resumed: .* step=(\d+)")
    for name in ("old", "elder"):
        again[name].line(r"took the state of a member: .* round=(\d+)")
    for name in NAMES:
        fresh = swarm.wait_for_rounds(name, counts[name] + 5)[counts[name] :]
        assert fresh[0]["round"] >= newest - 1, (name, newest, fresh[0])
        wait_for(partial(merged_since, swarm, name, counts[name]), 60)


def merged_since(swarm: Swarm, name: str, count: int) -> bool:
    """Is a round after the first ``count`` merged?"""
    return any(row["outcome"] == "merged" for row in swarm.rounds(name)[count:])
