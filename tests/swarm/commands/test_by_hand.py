"""A user's commands on three machines: a bootstrap node, two peers, a third one later, Ctrl+C in each."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

import psutil
import pytest

from tests.swarm.support.harness import Swarm, wait_for

pytestmark = pytest.mark.cold
LONG = ("run.steps=100000", "run.inner_steps=300")


def test_three_peers_join_one_after_the_other_and_leave_cleanly(swarm: Swarm) -> None:
    addresses = swarm.folder / "addresses"
    bootstrap, address = swarm.bootstrap("--addresses-file", str(addresses))
    assert addresses.read_text().split() == [address]
    health = "http://" + bootstrap.line(r"http=(\S+)").group(1) + "/healthz"
    first, second = swarm.peer("first", *LONG, address=address), swarm.peer("second", *LONG, address=address)
    swarm.wait_for_rounds("first", 2)
    wait_for(lambda: any(row["outcome"] == "merged" for row in swarm.rounds("second")), 60)
    with urllib.request.urlopen(health, timeout=5) as answer:
        assert json.load(answer)["connected_peers"] == 2

    third = swarm.peer("third", *LONG, address=address)
    took = third.line(r"took the state of a member: peer=(first|second) step=(\d+)")
    assert int(took.group(2)) >= 300
    rows = swarm.wait_for_rounds("third", 2)
    assert rows[0]["step"] == int(took.group(2)) + 300
    trained = next(row for row in rows if row["train_loss"] is not None)  # it may come with its donor's last step
    assert trained["train_loss"] < swarm.rounds("first")[0]["train_loss"] - 0.5  # it did not start with new weights
    wait_for(lambda: any(row["outcome"] == "merged" for row in swarm.rounds("third")), 60)

    swarm.note_children()
    for process, number in ((first, signal.SIGINT), (second, signal.SIGTERM), (third, signal.SIGINT)):
        process.signal(number)
        assert process.exit_code(30) == 0, process.output()
    bootstrap.signal(signal.SIGINT)
    assert bootstrap.exit_code(10) == 0
    assert swarm.left_over() == []
    for process in swarm.processes:
        assert "Traceback" not in process.output() and " ERROR " not in process.output()


def test_the_swarm_outlives_its_bootstrap_node_and_a_member(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    peers = {name: swarm.peer(name, *LONG, address=address) for name in ("a", "b", "c")}
    for name in peers:
        swarm.wait_for_rounds(name, 1)
    swarm.note_children()
    bootstrap.signal(signal.SIGKILL)
    peers["c"].signal(signal.SIGKILL)
    before = {name: len(swarm.rounds(name)) for name in ("a", "b")}

    member = peers["a"].line(r"address=(\S+)").group(1)
    swarm.peer("newcomer", *LONG, address=member).line(r"took the state of a member")
    swarm.wait_for_rounds("newcomer", 1)
    for name in ("a", "b"):
        wait_for(lambda name=name: any(row["outcome"] == "merged" for row in swarm.rounds(name)[before[name] :]), 60)  # type: ignore[misc]
        rows = swarm.wait_for_rounds(name, before[name] + 3)[before[name] :]
        assert all(row["seconds"]["match"] + row["seconds"]["exchange"] < 15 for row in rows)


@pytest.mark.parametrize("moment", ["before it is ready", "in its first steps"])
def test_ctrl_c_early_is_a_clean_exit_too(swarm: Swarm, moment: str) -> None:
    peer = swarm.peer("early", *LONG, "run.inner_steps=100000")
    if moment == "in its first steps":
        peer.line("val_loss=")
    else:
        wait_for(lambda: (swarm.folder / "early" / "identity.key").exists(), 60)
    swarm.note_children()
    peer.signal(signal.SIGINT)
    assert peer.exit_code(30) == 0, peer.output()
    assert swarm.left_over() == []
    assert not re.search("Traceback|error:", peer.output())


def test_a_peer_whose_p2p_daemon_dies_saves_and_says_so(swarm: Swarm) -> None:
    peer = swarm.peer("peer", *LONG)
    swarm.wait_for_rounds("peer", 1)
    swarm.note_children()
    (daemon,) = [child for child in psutil.Process(peer.pid).children() if child.name() == "p2pd"]
    daemon.kill()
    assert peer.exit_code(30) == 1
    assert re.search(r"^error: the p2p daemon \(pid \d+\) has died.*the state is saved", peer.output(), re.MULTILINE)
    assert "Traceback" not in peer.output()
    assert swarm.left_over() == []
