"""Late joins: peers that began without the swarm, because their restarted bootstrap node did not know the others."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from peer.p2p.addresses import owner_of
from peer.p2p.dht.join import Touch, get_in_touch
from tests.swarm.commands.test_own_loop import H, Program, Scene, together
from tests.swarm.support.harness import Swarm, wait_for

LEAD = 90  # rounds
LONG = ("run.steps=100000", "run.inner_steps=300")


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_newcomer_takes_the_swarms_weights_before_it_meets_a_member(swarm: Swarm, overlap: str) -> None:
    # enough batches that the loss of more training is lower: a newcomer takes no weights that are worse than its own
    sets = (*LONG, f"run.exchange.overlap={overlap}", "run.evaluation.batches=64")
    bootstrap, address = swarm.bootstrap()
    others = [swarm.peer(name, *sets, address=address) for name in "ab"]
    for name in "ab":
        swarm.wait_for_rounds(name, 20)
    bootstrap.signal(signal.SIGKILL)
    bootstrap.exit_code(10)
    newcomer = swarm.peer("newcomer", *sets, address=address)
    newcomer.line("connection refused; trying again")
    for peer in others:
        peer.signal(signal.SIGSTOP)  # otherwise they might reconnect to the bootstrap node
    (swarm.folder / "again.key").write_bytes((swarm.folder / "bootstrap.key").read_bytes())
    swarm.bootstrap(name="again", port=int(re.findall(r"/tcp/(\d+)", address)[0]))
    newcomer.line("round=1 .*outcome=alone")
    for peer in others:
        peer.signal(signal.SIGCONT)

    found = newcomer.line(r"the swarm is older than this peer: took its weights: own_round=(\d+) round=(\d+)")
    own, theirs = map(int, found.groups())
    assert theirs >= 20 > own
    rows = swarm.wait_for_rounds("newcomer", own + 3)
    assert all(row["outcome"] == "alone" for row in rows if row["round"] <= own)  # no member was set back
    assert next(row["round"] for row in rows if row["round"] > own) in (theirs, theirs + 1)
    for name in "ab":
        merges = [row for row in swarm.rounds(name) if row["partner"] == "newcomer" and row["outcome"] == "merged"]
        assert all(row["distance"] < 0.6 for row in merges), merges


class Late:
    """A program with its own loop that has begun away from its swarm. It makes two rounds a second."""

    def __init__(self, scene: Scene, name: str, overlap: bool, seed: int = 0) -> None:
        self.program = Program(seed, data=ord(name))
        self.outer = scene.start(self.program, name, {"run.exchange.overlap": overlap})

    def find(self, address: str) -> None:
        """Connect to the swarm as a member does, with a retry in case the swarm dials at the same moment."""
        node = self.outer._member.node
        found = partial(get_in_touch, node.p2p, node.dht, owner_of(address), [address])
        wait_for(lambda: node.call(found(), 15) is Touch.ANSWERS, 30)

    def train(self, until: Callable[[], bool]) -> None:
        for _ in range(100):
            self.program.train(self.outer, H)
            if until():
                return
            time.sleep(0.4)
        raise AssertionError(self.program.rounds)


@pytest.mark.parametrize(("overlap", "names"), [(True, "b"), (False, "bc")])
def test_peers_with_their_own_loop_take_the_swarms_weights_too(tmp_path: Path, overlap: bool, names: str) -> None:
    """Even if the late peers have met each other before."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        old = Late(scene, "a", overlap)
        old.program.train(old.outer, LEAD * H)
        (address,), scene.addresses = scene.addresses, ()
        late = [Late(scene, name, overlap) for name in names]
        together(*(partial(it.train, partial(has_met, it, len(names) - 1)) for it in late))
        assert all(it.outer.round < LEAD / 3 for it in late)

        for it in late:
            it.find(address)
        together(*(partial(it.train, lambda it=it: it.outer.round >= LEAD) for it in late))
        for it in late:
            assert {name for round in it.program.rounds for name in round.partners} <= set(names)
            assert it.outer.round in (LEAD, LEAD + 1)


def has_met(late: Late, others: int) -> bool:
    return len(late.program.rounds) > 2 and any(it.partners for it in late.program.rounds) == bool(others)
