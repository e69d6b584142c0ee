"""Groups of all peers with real processes: killed, frozen and late members, and equal weights at the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.training.checkpoint import Checkpoints
from tests.swarm.support.harness import TINY, Swarm, wait_for

DILOCO = ("run.outer={name: diloco, momentum: 0.5}", "run.exchange.stall=3", "run.inner_steps=150")
DECOUPLED = ("run.outer={name: decoupled}", "run.exchange.stall=3", "run.inner_steps=150")


def phi(folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    saved = Checkpoints(folder / "checkpoints", keep=1).newest()
    assert saved is not None
    return saved.tensors["outer"]["phi"], saved.state


def assert_equal_weights(swarm: Swarm, names: list[str]) -> None:
    first, state = phi(swarm.folder / names[0])
    for name in names[1:]:
        other, theirs = phi(swarm.folder / name)
        assert theirs["lineage"] == state["lineage"], (name, theirs["round"], state["round"])
        assert state["lineage"][1] > 0, "no round was averaged"
        assert torch.equal(first, other), name


def by_id(swarm: Swarm, names: list[str]) -> list[str]:
    """Names in the order of their ids: the first one leads."""
    from peer.p2p import identity

    return sorted(names, key=lambda name: identity.load_or_create(swarm.folder / name / "identity.key"))


@pytest.mark.parametrize(("victim", "fault"), [("leader", signal.SIGSTOP), ("member", signal.SIGKILL)])
def test_a_lost_member_costs_a_deadline_and_the_others_stay_equal(swarm: Swarm, victim: str, fault: int) -> None:
    _, address = swarm.bootstrap()
    names = ["a", "b", "c", "d"]
    peers = {name: swarm.peer(name, *DILOCO, "run.steps=2400", "peer.start_with=4", address=address) for name in names}
    for name in names:
        swarm.wait_for_rounds(name, 2)
    lost = by_id(swarm, names)[0 if victim == "leader" else 2]
    peers[lost].signal(fault)
    others = [name for name in names if name != lost]
    for name in others:
        assert peers[name].exit_code(100) == 0, peers[name].output()
    for name in others:
        rows = swarm.rounds(name)
        late = rows[-8:]
        assert {row["outcome"] for row in late} == {"merged"}, [(row["outcome"], row["detail"]) for row in rows]
        assert all(len(row["partner"].split(",")) == 2 for row in late)
        assert max(row["seconds"]["match"] + row["seconds"]["exchange"] for row in rows) < 30
        assert "Traceback" not in peers[name].output()
    assert_equal_weights(swarm, others)


def test_a_frozen_member_catches_up_when_it_continues(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    names = ["a", "b", "c"]
    peers = {name: swarm.peer(name, *DILOCO, "run.steps=6000", "peer.start_with=3", address=address) for name in names}
    for name in names:
        swarm.wait_for_rounds(name, 2)
    lost = by_id(swarm, names)[1]
    (one, two) = (name for name in names if name != lost)
    peers[lost].signal(signal.SIGSTOP)
    met = len(swarm.rounds(one))
    wait_for(
        lambda: any(row["partner"] == two and row["outcome"] == "merged" for row in swarm.rounds(one)[met:]),
        60,
        lambda: peers[one].output(),
    )
    peers[lost].signal(signal.SIGCONT)
    for name in names:
        assert peers[name].exit_code(300) == 0, peers[name].output()
    assert "took the state of a member" in peers[lost].output()
    assert swarm.rounds(one)[-1]["outcome"] == "merged"
    rows = swarm.rounds(lost)
    assert [row["outcome"] for row in rows[-5:]] == ["merged"] * 5, [(row["outcome"], row["detail"]) for row in rows]
    assert_equal_weights(swarm, names)


def test_a_newcomer_is_in_the_group_from_its_first_boundary(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    peers = {name: swarm.peer(name, *DILOCO, "run.steps=5000", address=address) for name in ("a", "b")}
    for name in ("a", "b"):
        swarm.wait_for_rounds(name, 2)
    peers["late"] = swarm.peer("late", *DILOCO, "run.steps=5000", address=address)
    rows = swarm.wait_for_rounds("late", 4)
    assert [row["outcome"] for row in rows].count("merged") >= 3, [(row["outcome"], row["detail"]) for row in rows]
    for process in peers.values():
        assert process.exit_code(300) == 0, process.output()
    assert_equal_weights(swarm, ["a", "b", "late"])


def test_decoupled_peers_merge_and_differ(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    sets = (*DECOUPLED, "run.steps=1500", "peer.start_with=3")
    peers = {name: swarm.peer(name, *sets, address=address) for name in ("a", "b", "c")}
    for process in peers.values():
        assert process.exit_code(100) == 0, process.output()
    merged = [row for name in peers for row in swarm.rounds(name) if row["outcome"] == "merged"]
    assert len(merged) >= 20
    numel = phi(swarm.folder / "a")[0].numel()
    assert (
        max(row["bytes_sent"] for row in merged) < 0.2 * 4 * numel
    )  # a tiny model: one coefficient of each small chunk
    assert not torch.equal(phi(swarm.folder / "a")[0], phi(swarm.folder / "b")[0])


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.smoke), "decoupled"])
def test_the_methods_demo_configuration_runs_as_a_swarm(swarm: Swarm, method: str) -> None:
    sets = [*TINY, f"run.dir={swarm.folder}/runs", "run.steps=400", "run.inner_steps=100"]
    overrides = [word for override in sets for word in ("--set", override)]
    config = f"configs/demo-{method}.yaml"
    process = swarm.start("swarm", ["-m", "peer", "swarm", "--peers", "3", "--config", config, *overrides])
    assert process.exit_code(150) == 0, process.output()
    summary = json.loads((swarm.folder / "runs" / "summary.json").read_text())
    assert summary["swarm"]["method"] == method
    for row in summary["peers"].values():
        assert row["rounds"]["merged"] >= 2, process.output()
        assert row["val_loss"] < row["first_val_loss"]
    if method == "diloco":
        assert summary["swarm"]["spread"] == 0
