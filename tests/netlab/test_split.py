"""A network partition: both halves train on, and become one swarm again when the partition ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.netlab.peers import LabSwarm
from tests.netlab.plan import load
from tests.swarm.support.harness import TINY

pytestmark = pytest.mark.needs("laboratory")
NAMES = ("a", "b", "c", "d")
HALVES = (("a", "b"), ("c", "d"))  # the bootstrap node is on the first half's side
SETS = (
    *TINY,
    "run.steps=100000000",
    "run.inner_steps=60",
    "run.evaluation.every_rounds=100000",
    "run.exchange.stall=3",
)
SPLIT = 45.0  # seconds: longer than the lifetime of a member record


@pytest.mark.parametrize("method", ["demo", "demo-diloco"])
def test_two_halves_become_one_swarm_again(tmp_path: Path, method: str) -> None:
    with LabSwarm(load("lan"), len(NAMES), tmp_path, warm=True) as swarm:
        for host, name in enumerate(NAMES, 1):
            swarm.peer(host, name, f"configs/{method}.yaml", SETS)

        def met(one: str, since: int) -> set[str]:
            """The partners of its merged rounds from round ``since`` on."""
            rows = swarm.tail(one).rounds[since:]
            return {name for row in rows if row["outcome"] == "merged" for name in row["partner"].split(",")}

        def last(one: str) -> str:
            """The partners of its last round."""
            return swarm.tail(one).rounds[-1]["partner"] or ""

        def counts() -> dict[str, int]:
            return {name: len(swarm.tail(name).rounds) for name in NAMES}

        swarm.wait_for(lambda: all(len(met(name, 0)) == 3 for name in NAMES))
        swarm.lab.part([0, 1, 2], [3, 4])
        time.sleep(SPLIT / 3)
        split = counts()
        time.sleep(2 * SPLIT / 3)
        for half in HALVES:
            for name in half:
                assert met(name, split[name]) == set(half) - {name}, (name, met(name, split[name]))
        swarm.lab.part()
        healed = counts()
        swarm.wait_for(lambda: all(len(met(name, healed[name])) == 3 for name in NAMES), 90)
        if method == "demo-diloco":  # the four compared their digests
            swarm.wait_for(lambda: all(last(name).count(",") == 2 for name in NAMES), 90)
