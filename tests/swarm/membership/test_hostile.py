"""One peer of three sends what would ruin a model and cannot be clipped: it is refused, counted and avoided."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections import Counter

import pytest

from tests.swarm.support.harness import Swarm, wait_for

HONEST = ("a", "b")


@pytest.mark.parametrize(("attack", "overlap"), [("nan", "true"), ("nan", "false")])
def test_a_peer_that_sends_poison_is_refused_and_then_avoided(swarm: Swarm, attack: str, overlap: str) -> None:
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
        assert not met["hostile", "merged"], met
        assert 1 <= met["hostile", "poisoned"] <= 6, met  # of 30 rounds: a backoff of 4, 8, 16 phases
        assert met[other, "merged"] >= 10, met
        losses = [row["train_loss"] for row in rows if row["train_loss"] is not None]  # the last swaps have none
        assert losses[-1] < rows[0]["first_train_loss"] - 1
        assert "avoids a peer: peer=hostile" in process.output()


def test_a_newcomer_with_bad_weights_from_a_hostile_donor_recovers(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    monitor = "http://" + bootstrap.line(r"http=(\S+)").group(1) + "/swarm.json"

    def told(name: str) -> bool:
        """Does its record say that it has made a round?"""
        with urllib.request.urlopen(monitor, timeout=10) as answer:
            peers = [peer for run in json.load(answer)["runs"] for peer in run["peers"]]
        return any(peer["name"] == name and peer["round"] > 0 for peer in peers)

    sets = ("run.inner_steps=50", "run.steps=1000000", "run.inner.learning_rate=3e-4")
    hostile = swarm.train("hostile", *sets, address=address)
    hostile[1] = "tests.swarm.programs.hostile_peer"
    honest = [swarm.peer(name, *sets, address=address) for name in HONEST]
    wait_for(lambda: all(map(told, HONEST)), 60)
    swarm.start("hostile", hostile, {"FALSE_DONOR": "yes"}).line("took the state of a member")
    wait_for(lambda: told("hostile"), 60)
    for peer in honest:
        peer.signal(signal.SIGSTOP)  # so that the newcomer asks the hostile donor
    newcomer = swarm.peer("newcomer", *sets, address=address)
    newcomer.line("took the state of a member: peer=hostile")
    for peer in honest:
        peer.signal(signal.SIGCONT)

    newcomer.line("this peer has nothing in common with the swarm: took its weights", 120)
    since = len(swarm.rounds("newcomer"))

    def met() -> set[str]:
        rows = swarm.rounds("newcomer")[since:]
        return {row["partner"] for row in rows if row["outcome"] == "merged" and row["distance"] < 0.5}

    wait_for(lambda: met() >= set(HONEST), 60, newcomer.output)
    for peer in honest:
        assert "took its weights" not in peer.output()
