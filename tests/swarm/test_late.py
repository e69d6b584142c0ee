"""Peers that began where nobody was to be seen: their bootstrap node was started again and did not know the others."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from peer.swarm.entry import back_in_touch
from tests.swarm.harness import Swarm
from tests.swarm.test_own_loop import H, Program, Scene

LONG = ("run.steps=100000", "run.inner_steps=300")


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_who_began_alone_takes_the_swarms_weights_before_it_meets_anybody(swarm: Swarm, overlap: str) -> None:
    sets = (*LONG, f"run.exchange.overlap={overlap}")
    bootstrap, address = swarm.bootstrap()
    others = [swarm.peer(name, *sets, address=address) for name in "ab"]
    for name in "ab":
        swarm.wait_for_rounds(name, 20)
    bootstrap.signal(signal.SIGKILL)
    bootstrap.exit_code(10)
    newcomer = swarm.peer("newcomer", *sets, address=address)
    newcomer.line("connection refused; trying again")
    for peer in others:
        peer.signal(signal.SIGSTOP)  # they may look for the bootstrap node again at any moment
    (swarm.folder / "again.key").write_bytes((swarm.folder / "bootstrap.key").read_bytes())
    swarm.bootstrap(name="again", port=int(re.findall(r"/tcp/(\d+)", address)[0]))
    newcomer.line("round=1 .*outcome=alone")
    for peer in others:
        peer.signal(signal.SIGCONT)

    found = newcomer.line(r"the swarm was there before: took its weights: own_round=(\d+) round=(\d+)")
    own, theirs = map(int, found.groups())
    assert theirs >= 20 > own
    rows = swarm.wait_for_rounds("newcomer", own + 3)
    assert all(row["outcome"] == "alone" for row in rows if row["round"] <= own)  # nobody was set back
    assert next(row["round"] for row in rows if row["round"] > own) in (theirs, theirs + 1)
    for name in "ab":
        merges = [row for row in swarm.rounds(name) if row["partner"] == "newcomer" and row["outcome"] == "merged"]
        assert all(row["distance"] < 0.6 for row in merges), merges


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_of_ones_own_does_so_too(tmp_path: Path, overlap: bool) -> None:
    settings = {"run.exchange.overlap": overlap}
    first, second = Program(), Program(data=1)
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        one = scene.start(first, "one", settings)
        first.train(one, 100 * H)
        (address,), scene.addresses = scene.addresses, ()
        two = scene.start(second, "two", settings)
        second.train(two, 3 * H)
        assert two.round == 3

        node = two._member.node
        assert node.call(back_in_touch(node.p2p, node.dht, address), 10)
        for _ in range(200):
            second.train(two, H)
            if two.round >= 100:
                break
        assert two.round == 100
        assert not any(it.partners for it in second.rounds)
        if not overlap:
            assert torch.equal(second.weights(), first.weights())
