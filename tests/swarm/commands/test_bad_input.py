"""User errors: exit code 2 and one line that names the error, its place and the remedy; 1 where a restart may help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from peer.p2p import greeting
from tests.swarm.support.harness import DEMO, Process, Swarm, clock_ahead, listening
from tests.swarm.support.node_peer import Peer

ABSENT = "/ip4/127.0.0.1/tcp/9/p2p/QmNVmMnryXcqL5moYaR97Sc18UHgdReEHNDmZihKXJPwKa"


def refused(process: Process, *says: str, code: int = 2) -> None:
    """The process ends with one error line and no traceback."""
    assert process.exit_code(60) == code, process.output()
    errors = [line for line in process.output().splitlines() if not re.match(r"\d{4}-\d\d-\d\d .*peer=", line)]
    assert len(errors) == 1 and errors[0].startswith("error: "), process.output()
    for words in says:
        assert words in errors[0], errors[0]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.inner.learning_rat=1", "run.inner.learning_rat: unknown key, did you mean learning_rate?"),
        ("run.steps=many", "run.steps: input should be a valid integer"),
        ("run.outer={name: noloco, alpha: 0.5, gamma: 1.5}", "0 < gamma < 2(1 - alpha^2) = 1.5"),
        ("run.data={name: text, train: [/none/*.txt]}", "run.data.train: no file matches /none/*.txt"),
        ("peer.checkpoint.keep=1000000000", "no space for checkpoints"),
        pytest.param(
            "peer.device=cuda",
            "peer.device: cuda is not available here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is"),
        ),
        ("peer.network.host=203.0.113.1", "no such address on this machine"),
    ],
)
def test_a_mistake_in_the_configuration(swarm: Swarm, override: str, says: str) -> None:
    refused(swarm.peer("peer", override), says)


def test_a_missing_configuration(swarm: Swarm) -> None:
    refused(swarm.start("none", ["-m", "peer", "train", "--config", "none.yaml"]), "none.yaml: cannot read")


def test_a_wrong_configuration_of_a_swarm_is_one_line(swarm: Swarm) -> None:
    wrong = ["--set", f"run.dir={swarm.folder}", "--set", "run.data={name: text, train: [/none]}"]
    command = ["-m", "peer", "swarm", "--peers", "2", "--config", str(DEMO), *wrong]
    refused(swarm.start("swarm", command), "no file matches /none")


UNTOUCHED = ("run.model={name: auto, source: /none}", "run.data={name: text, train: [/none/*.txt]}")  # raise when read


def test_an_initial_peer_that_does_not_listen_is_named_before_model_and_data_are_touched(swarm: Swarm) -> None:
    peer = swarm.peer("peer", "peer.network.join_timeout=3", *UNTOUCHED, address=ABSENT)
    refused(peer, ABSENT, "connection refused", "Check that the bootstrap node runs", code=1)
    assert peer.output().count("trying again") >= 2


def test_an_address_of_another_node_is_not_tried_again(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    peer = swarm.peer("peer", *UNTOUCHED, address=f"{address.rpartition('/')[0]}/{ABSENT.rpartition('/')[2]}")
    refused(peer, "cannot reach any initial peer", "peer id mismatch")
    assert "trying again" not in peer.output()


def test_a_swarm_of_another_version_is_known_before_model_and_data_are_touched(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "WIRE_VERSION", 99)
    member = Peer("old", swarm.folder, ())
    try:
        peer = swarm.peer("peer", "run.name=test", *UNTOUCHED, address=member.node.addresses[0])
        told = ("peer old refuses this one: it runs noloco-peer", "(wire version 99)", "update the older one")
        refused(peer, *told, code=1)  # others may be updated later
    finally:
        member.presence.leave()


def test_an_invalid_address(swarm: Swarm) -> None:
    refused(swarm.peer("peer", address="localhost:31337"), "'localhost:31337' is not an address", "/ip4/")


def test_one_live_address_is_enough(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    peer = swarm.peer("peer", "run.steps=10", "run.inner_steps=10", f"peer.initial_peers=[{ABSENT}, {address}]")
    assert peer.exit_code(60) == 0, peer.output()
    assert f"initial peer {ABSENT}: connection refused" in peer.output()


def test_a_configuration_that_differs_from_the_swarms(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    swarm.peer("first", "run.steps=100000", address=address).line("ready:")
    untouched = "run.evaluation.sets={other: [/none]}"
    other = swarm.peer("other", "run.steps=100000", "run.inner.learning_rate=0.5", untouched, address=address)
    refused(other, "run.inner.learning_rate is 0.5 here and 0.003 there (at peer first)")


def test_occupied_ports(swarm: Swarm) -> None:
    with listening() as port:
        refused(swarm.peer("p2p", f"peer.network.port={port}"), "port occupied", str(port))
        refused(swarm.peer("metrics", f"peer.metrics.port={port}"), "port occupied", str(port), "peer.metrics.port")
        bootstrap = ["-m", "dht_bootstrap", "--host", "127.0.0.1", "--identity", str(swarm.folder / "b.key")]
        refused(swarm.start("b1", [*bootstrap, "--http-port", "0", "--port", str(port)]), "port occupied", str(port))
        refused(
            swarm.start("b2", [*bootstrap, "--port", "0", "--http-port", str(port)]), "port occupied", "--http-port"
        )


def test_the_port_of_another_peer_of_this_machine(swarm: Swarm) -> None:
    """Both listened on it, and who called one of them often had the other one."""
    _, address = swarm.bootstrap()
    port = address.partition("/tcp/")[2].partition("/")[0]
    refused(swarm.peer("peer", f"peer.network.port={port}"), "port occupied", port)


def test_an_invalid_identity_file(swarm: Swarm) -> None:
    key = swarm.folder / "garbage.key"
    key.write_text("garbage")
    refused(swarm.peer("peer", f"peer.identity={key}"), f"identity file {key}: not a key")


def test_a_folder_that_is_in_use(swarm: Swarm) -> None:
    swarm.peer("same", "run.steps=100000").line("ready:")
    refused(swarm.start("second", swarm.train("same")), "is used by a running peer")


@pytest.mark.cold
def test_a_wrong_clock(swarm: Swarm, tmp_path: Path) -> None:
    _, address = swarm.bootstrap()
    refused(
        swarm.peer("late", address=address, env=clock_ahead(tmp_path / "shifted", 10)),
        "clock is 10",
        "s ahead of",
        "NTP",
        code=1,
    )
