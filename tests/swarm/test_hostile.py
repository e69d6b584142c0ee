"""One peer of three sends what would ruin a model: it is refused, counted, and soon not met any more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.swarm.harness import Swarm

HONEST = ("a", "b")


@pytest.mark.parametrize(("attack", "overlap"), [("nan", "true"), ("huge", "false"), ("random", "false")])
def test_who_sends_poison_is_refused_and_then_avoided(swarm: Swarm, attack: str, overlap: str) -> None:
    _, address = swarm.bootstrap()
    sets = ("run.inner_steps=100", "run.steps=3000", "peer.start_with=3", f"run.exchange.overlap={overlap}")
    hostile = swarm.train("hostile", *sets, address=address)
    hostile[1] = "tests.swarm.programs.hostile_peer"
    swarm.start("hostile", hostile, {"HOSTILE": attack})
    peers = {name: swarm.peer(name, *sets, address=address) for name in HONEST}
    for name, process in peers.items():
        assert process.exit_code(120) == 0, process.output()
        assert "Traceback" not in process.output()
        rows = swarm.rounds(name)
        met = Counter((row["partner"], row["outcome"]) for row in rows)
        other = "b" if name == "a" else "a"
        assert met["hostile", "merged"] <= (attack == "random"), met  # a new model changes by as much as it is long
        assert 1 <= met["hostile", "poisoned"] <= 6, met  # of 30 rounds: 4, 8, 16 phases of peace
        assert met[other, "merged"] >= 10, met
        assert rows[-1]["train_loss"] < rows[0]["first_train_loss"] - 1
        assert "avoids a peer: peer=hostile" in process.output()
