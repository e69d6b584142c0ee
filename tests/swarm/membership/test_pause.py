"""A peer is paused and resumed by its commands, while others go on; and by its hours."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from datetime import datetime, timedelta
from typing import Any

from tests.swarm.support.harness import Swarm, wait_for

LONG = ("run.steps=1000000", "run.inner_steps=50", "peer.checkpoint.every_rounds=100000")


def asked(swarm: Swarm, request: str, name: str) -> str:
    """``noloco-peer pause`` or ``resume``; what it says."""
    process = swarm.start(request, ["-m", "peer", request, name, "--dir", str(swarm.folder)])
    assert process.exit_code(30) == 0, process.output()
    return process.output()


def merges_with(swarm: Swarm, name: str, partner: str) -> int:
    return sum(row["outcome"] == "merged" and partner in row["partner"] for row in swarm.rounds(name))


def swarm_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/swarm.json", timeout=10) as answer:
        return dict(json.loads(answer.read()))


def states(url: str) -> dict[str, str]:
    return {peer["name"]: peer["state"] for run in swarm_json(url)["runs"] for peer in run["peers"]}


def test_a_paused_peer_stays_out_and_merges_again_when_it_is_resumed(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    url = "http://" + bootstrap.line(r"http=(\S+)").group(1)
    peers = {name: swarm.peer(name, *LONG, address=address) for name in ("ann", "bob", "cat")}
    metrics = "http://" + peers["bob"].line(r"metrics=(\S+)").group(1) + "/metrics"
    wait_for(lambda: merges_with(swarm, "ann", "bob") and merges_with(swarm, "cat", "bob"), 60)

    assert "bob" in asked(swarm, "pause", "bob")
    paused = peers["bob"].line(r"paused: step=(\d+)")
    rounds = len(swarm.rounds("bob"))
    wait_for(lambda: states(url).get("bob") == "paused", 60, lambda: str(states(url)))
    before = len(swarm.rounds("ann"))
    wait_for(lambda: merges_with(swarm, "ann", "cat") and len(swarm.rounds("ann")) > before + 20, 60)
    outcomes = [row["outcome"] for row in swarm.rounds("ann")[before + 10 :]]
    assert outcomes.count("merged") > len(outcomes) / 3  # with cat, who has the same choice
    assert all(row["partner"] != "bob" for row in swarm.rounds("ann")[before + 10 :])
    assert len(swarm.rounds("bob")) == rounds
    with urllib.request.urlopen(metrics, timeout=10) as answer:
        series = answer.read().decode()
    assert re.search(r'noloco_phase_info\{phase="paused"\} 1\.0', series)
    assert float(re.search(r'noloco_phase_seconds_total\{phase="paused"\} (\S+)', series)[1]) > 0  # type: ignore[index]
    assert (swarm.folder / "bob" / "checkpoints" / "latest").read_text().strip().endswith(f"{int(paused[1]):08d}")

    met = merges_with(swarm, "ann", "bob")
    assert "bob" in asked(swarm, "resume", "bob")
    resumed = peers["bob"].line(r"resumed: step=(\d+) round=(\d+)")
    assert int(resumed[1]) > int(paused[1])  # it has caught up
    wait_for(lambda: merges_with(swarm, "ann", "bob") > met, 60)
    wait_for(lambda: states(url).get("bob") == "training", 60)

    asked(swarm, "pause", "bob")
    wait_for(lambda: peers["bob"].output().count("paused: ") == 2, 60)
    peers["bob"].signal(signal.SIGINT)
    assert peers["bob"].exit_code(20) == 0, peers["bob"].output()
    gone = swarm.start("again", ["-m", "peer", "pause", "bob", "--dir", str(swarm.folder)])
    assert gone.exit_code(30) == 2 and "bob: no peer runs there" in gone.output()


def test_outside_of_its_hours_a_peer_joins_and_pauses_until_it_is_resumed_by_hand(swarm: Swarm) -> None:
    later = datetime.now() + timedelta(hours=6)
    hours = f"peer.hours={later:%H:%M}-{later + timedelta(hours=6):%H:%M}"
    peer = swarm.peer("night", *LONG, hours)
    assert int(peer.line(r"paused: step=(\d+)")[1]) == 0
    assert swarm.rounds("night") == []
    asked(swarm, "resume", "night")
    swarm.wait_for_rounds("night", 2)
