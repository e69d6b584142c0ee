"""A swarm that comes back from nothing but its checkpoints goes on from the newest of them."""

from __future__ import annotations

import signal

import pytest

from tests.swarm.harness import Swarm

NOLOCO = ("run.inner_steps=20", "peer.checkpoint.every_rounds=1")
DILOCO = (*NOLOCO, "run.outer={name: diloco, momentum: 0.5}", "run.exchange.stall=3")


@pytest.mark.parametrize("sets", [NOLOCO, DILOCO], ids=["noloco", "diloco"])
def test_a_whole_swarm_that_was_killed_goes_on_from_its_newest_state(swarm: Swarm, sets: tuple[str, ...]) -> None:
    _, address = swarm.bootstrap()
    names = ("old", "one", "two")
    sets = (*sets, "run.steps=1000000")
    peers = {name: swarm.peer(name, *sets, "peer.start_with=3", address=address) for name in names}
    swarm.wait_for_rounds("old", 2)
    peers["old"].signal(signal.SIGKILL)
    left = swarm.rounds("old")[-1]["round"]
    swarm.wait_for_rounds("one", left + 25)
    for name in ("one", "two"):
        peers[name].signal(signal.SIGKILL)
        peers[name].exit_code(10)
    before = {name: swarm.rounds(name)[-1]["round"] for name in names}
    assert before["old"] + 15 < before["one"], before

    again = {
        name: swarm.start(f"{name}-again", swarm.train(name, *sets, "peer.start_with=3", address=address))
        for name in names
    }
    for name in names:
        again[name].line(r"resumed: .* step=(\d+)")
    again["old"].line(r"took the state of a member: .* round=(\d+)")
    for name in names:
        count = len(swarm.rounds(name))
        fresh = swarm.wait_for_rounds(name, count + 5)[count:]
        assert fresh[0]["round"] >= min(before["one"], before["two"]) - 1, (name, before, fresh[0])
        assert any(row["outcome"] == "merged" for row in swarm.rounds(name)[-5:])
