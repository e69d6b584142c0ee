"""``noloco-peer join ADDRESS`` with real processes: no file of the swarm's is on the newcomer's machine."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from peer.config.digest import canonical, digest
from peer.config.load import load
from tests.swarm.membership.test_admission import LONG, Invited, refused
from tests.swarm.support.harness import Process, Swarm, wait_for

OWN = """
run:
  name: ours
  steps: 1000000
  inner_steps: 20
  seed: 7
  batch_size: 2
  model: {hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2}
  data: {name: stdlib, sequence_length: 16}
  exchange: {overlap: false, codec: fp16}
peer: {threads: 1, network: {host: 127.0.0.1}, metrics: {port: 0}}
"""


def join(swarm: Swarm, name: str, *arguments: str) -> Process:
    """The command with nothing but its arguments; name and folder come from the environment."""
    own = {"NOLOCO_PEER_NAME": name, "NOLOCO_RUN_DIR": str(swarm.folder), "OMP_NUM_THREADS": "1"}
    return swarm.start(name, ["-m", "peer", "join", *arguments], own)


def first(swarm: Swarm, address: str, name: str = "first", file: Path | None = None, *sets: str) -> Process:
    """A peer with a file of its own."""
    if file is None:
        (file := swarm.folder / "ours.yaml").write_text(OWN)
    own = [f"run.dir={swarm.folder}", f"peer.name={name}", *sets]
    overrides = [word for override in own for word in ("--set", override)]
    return swarm.start(name, ["-m", "peer", "train", "--config", str(file), "--initial-peers", address, *overrides])


def page(bootstrap: Process) -> dict[str, Any]:
    url = "http://" + bootstrap.line(r"http=(\S+)").group(1) + "/swarm.json"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def merged(swarm: Swarm, name: str, partner: str) -> None:
    wait_for(
        lambda: any(it["outcome"] == "merged" and it["partner"] == partner for it in swarm.rounds(name)),
        60,
        lambda: "\n".join(process.output() for process in swarm.processes),
    )


@pytest.mark.smoke
def test_a_newcomer_needs_the_address_and_nothing_else(swarm: Swarm) -> None:
    bootstrap, address = swarm.bootstrap()
    early = join(swarm, "early", address, "--run", "ours")
    refused(early, "nobody trains ours there yet", "noloco-peer train", code=1)  # a service tries again
    one = first(swarm, address)
    one.line("ready: ")
    newcomer = join(swarm, "second", address)
    newcomer.line("took the state of a member", 60)
    merged(swarm, "second", "first")
    run = load(swarm.folder / "ours.yaml", environment={}).run
    assert f"ours: the configuration {digest(run)}, of 1 of 1 members" in newcomer.output()
    assert f"config={digest(run)}" in newcomer.output()
    # the bootstrap node's page offers the same, as a file for others
    wait_for(lambda: (it := page(bootstrap)["runs"]) and it[0]["configuration"]["run"], 30)
    (found,) = page(bootstrap)["runs"]
    assert found["configuration"]["digest"] == digest(run) and found["configuration"]["own_program"] is False
    (file := swarm.folder / "from-page.yaml").write_text(json.dumps({"run": found["configuration"]["run"]}))
    assert canonical(load(file, environment={}).run) == canonical(run)
    # any member's address does, also after the end of the bootstrap node
    bootstrap.signal(9)
    third = join(swarm, "third", newcomer.line(r"address=(\S+)").group(1), "--config", str(file))
    third.line("took the state of a member", 60)
    assert all(process.popen.poll() is None for process in (one, newcomer, third))


def test_a_newcomer_that_no_member_answers_has_the_configuration_from_the_bootstrap_node(swarm: Swarm) -> None:
    """As when all members are behind NAT: it cannot call them, and they do not know it yet."""
    bootstrap, address = swarm.bootstrap()
    one = first(swarm, address)
    one.line("ready: ")
    wait_for(lambda: (it := page(bootstrap)["runs"]) and it[0]["configuration"]["run"], 30)
    one.signal(signal.SIGSTOP)
    newcomer = join(swarm, "second", address)
    newcomer.line("ours: the configuration [0-9a-f]+, of 1 of 1 members", 60)
    newcomer.line("ready: ", 90)
    one.signal(signal.SIGCONT)
    merged(swarm, "second", "first")


def test_several_runs_are_listed_and_one_is_chosen(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    first(swarm, address).line("ready: ")
    first(swarm, address, "other", swarm.folder / "ours.yaml", "run.name=theirs", "run.inner_steps=30").line("ready: ")
    refused(join(swarm, "which", address), "ours (1 peer), theirs (1 peer)", "--run NAME")
    join(swarm, "second", address, "--run", "theirs").line("took the state of a member", 60)
    merged(swarm, "second", "other")


def test_an_invited_swarm_is_joined_with_the_invitation_alone(swarm: Swarm) -> None:
    invited = Invited(swarm)
    invited.peer("a", *LONG).line("ready: ")
    refused(join(swarm, "uninvited", invited.address), "for invited peers", "peer.invitation")
    invited.invite("b")
    newcomer = join(swarm, "b", invited.address, "--invitation", str(swarm.folder / "b.invitation"))
    newcomer.line("took the state of a member", 60)
    merged(swarm, "b", "a")
    configuration = page(invited.process)["runs"][0]["configuration"]
    assert page(invited.process)["invited"] is True and configuration["run"]["admission"] == "invite"
