"""Peers behind separate NATs train with peers that can be dialled, and with each other through a relay."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from peer.p2p.addresses import is_circuit, place_of, tcp_of
from tests.netlab.lab import ROOT, Lab
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Path_, Plan
from tests.netlab.test_netlab import measure, serving
from tests.swarm.support.harness import SLOW_LINE, TINY

pytestmark = pytest.mark.needs("laboratory")
NETWORK = "131.77"  # public: libp2p treats private and reserved addresses differently; nothing leaves the laboratory
PUBLIC, CONE, SYMMETRIC, CHECKED = 1, 2, 3, 4  # hosts; the bootstrap node is 0
AT_HOME, GUEST = {1: "one", 2: "two"}, 3
HOMES = Plan(network=NETWORK, nat={CONE: "cone", SYMMETRIC: "symmetric", CHECKED: "cone"}, path=Path_(rtt_ms=10))
SETS = (*TINY, SLOW_LINE, "run.steps=100000000", "run.inner_steps=20", "run.evaluation.every_rounds=100000")


def test_a_nat_drops_packets_from_hosts_that_its_host_has_not_sent_to() -> None:
    with Lab(Plan(network=NETWORK, nat={1: "cone"}), 2) as lab, serving(lab, 0, 1):
        assert measure(lab, 1, "ping", lab.address(0), "3")["lost"] == 0
        assert measure(lab, 0, "ping", lab.address(1), "3")["lost"] == 1
        assert measure(lab, 1, "send", lab.address(0), "1")["bytes"] == 1e6  # TCP: the checksums are right


@pytest.mark.smoke
def test_peers_behind_two_nats_train_with_all_others(tmp_path: Path) -> None:
    names = {PUBLIC: "open", CONE: "cone", SYMMETRIC: "symmetric"}
    with LabSwarm(HOMES, 4, tmp_path, warm=True) as swarm:
        for host, name in names.items():
            swarm.peer(host, name, "configs/demo.yaml", (*SETS, "peer.start_with=3"))

        def met(name: str) -> set[str]:
            return {row["partner"] for row in swarm.tail(name).rounds if row["outcome"] == "merged"}

        swarm.wait_for(lambda: all(met(name) == {*names.values()} - {name} for name in names.values()))
        logs = {name: (tmp_path / f"{name}.log").read_text() for name in names.values()}
        for name in ("cone", "symmetric"):
            assert "it uses relays" in logs[name] and "/p2p-circuit" in logs[name].partition(" ready: ")[2]
        assert "relay" not in logs["open"].partition(" ready: ")[0]

        found = check(swarm, CHECKED)
        assert found.returncode == 0, found.stdout + found.stderr
        said = f"sees this machine as {swarm.lab.address(CHECKED)} and cannot dial it"
        advice = [line for line in found.stdout.splitlines() if line.startswith("warn  reachability") and said in line]
        assert len(advice) == 1 and "through relays" in advice[0] and "forward TCP 31400" in advice[0], found.stdout
        assert "ok    relay" in found.stdout and "3 members train this configuration" in found.stdout


def test_a_guest_of_a_home_network_trains_with_peers_that_it_cannot_dial(tmp_path: Path) -> None:
    """A router forwards the bootstrap node's port only, as docker/compose.yaml does."""
    plan = Plan(network="172.20", nat={GUEST: "cone"}, path=Path_(rtt_ms=10))
    with LabSwarm(plan, 3, tmp_path, warm=True) as swarm:
        swarm.lab.part([0, *AT_HOME], [0, GUEST])

        def merged(name: str) -> set[str]:
            return {row["partner"] for row in swarm.tail(name).rounds if row["outcome"] == "merged"}

        for host, name in AT_HOME.items():
            swarm.peer(host, name, "configs/demo.yaml", (*SETS, "peer.start_with=2"))
        swarm.wait_for(lambda: all(merged(name) for name in AT_HOME.values()))
        swarm.peer(GUEST, "guest", "configs/demo.yaml", (*SETS, "peer.start_with=1"))
        swarm.wait_for(lambda: merged("guest") == {*AT_HOME.values()})
        logs = {name: (tmp_path / f"{name}.log").read_text() for name in (*AT_HOME.values(), "guest")}
        assert "it uses relays" in logs["guest"] and "took the state of a member" in logs["guest"]
        for name in AT_HOME.values():
            assert "those of other networks use a relay" in logs[name] and "it uses relays" not in logs[name]


class BareNode:
    """tests/netlab/nat_node.py on a host."""

    def __init__(self, lab: Lab, host: int, folder: Path, reach: str, *initial: str) -> None:
        words = [str(folder / f"{host}.key"), lab.inside(host), "31337", reach, *initial]
        command = lab.command(host, [sys.executable, "-m", "tests.netlab.nat_node", *words])
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(self) -> Any:
        """The next line as JSON. The test's timeout bounds the wait."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the node has ended"
        return json.loads(line)

    def ways_to(self, other: dict[str, Any]) -> list[str]:
        """Send to the first address of ``other``; the addresses of the connections to it, or none if sending failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{other['id']} {place_of(other['addresses'][0])}\n")
        self.process.stdin.flush()
        return list(self.said())

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.stdin.closed:
            return
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()


@contextmanager
def two_homes(folder: Path, publics: int) -> Iterator[tuple[list[BareNode], list[Any]]]:
    """Two nodes behind NATs with ``publics`` public nodes as initial peers, and the first line of each of the two."""
    plan = Plan(network=NETWORK, nat={publics: "cone", publics + 1: "cone"}, path=Path_(rtt_ms=10))
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(plan, publics + 2))

        def start(hosts: range, reach: str, *initial: str) -> list[BareNode]:
            nodes = [BareNode(lab, host, folder, reach, *initial) for host in hosts]
            for node in nodes:
                stack.callback(node.end)
            return nodes

        first = start(range(1), "public")
        address = first[0].said()["addresses"][0]
        rest = [node.said()["addresses"][0] for node in start(range(1, publics), "public", address)]
        homes = start(range(publics, publics + 2), "auto", address, *rest)
        yield homes, [node.said() for node in homes]


def test_hole_punching_connects_two_cone_nats_once_enough_peers_have_observed_them(tmp_path: Path) -> None:
    with two_homes(tmp_path, publics=4) as (homes, said):  # libp2p trusts an address that four peers observed
        assert all(is_circuit(it["addresses"][0]) for it in said)
        until, ways = time.monotonic() + 90, homes[0].ways_to(said[1])
        assert any(map(is_circuit, ways))  # they connect through a relay first
        while all(map(is_circuit, ways)) and time.monotonic() < until:
            time.sleep(1)
            ways = homes[0].ways_to(said[1])
        direct = [tcp_of(it) for it in ways if not is_circuit(it)]
        assert direct and direct[0] is not None and direct[0][0] == f"{NETWORK}.0.6", ways


def test_a_restarted_relay_relays_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plan = Plan(network=NETWORK, nat={1: "cone", 2: "symmetric"}, path=Path_(rtt_ms=10))
        lab = stack.enter_context(Lab(plan, 3))
        relay = BareNode(lab, 0, tmp_path, "public")
        stack.callback(relay.end)
        address = relay.said()["addresses"][0]
        homes = [BareNode(lab, host, tmp_path, "auto", address) for host in (1, 2)]
        for home in homes:
            stack.callback(home.end)
        said = [home.said() for home in homes]
        assert homes[0].ways_to(said[1])
        relay.end()
        assert not homes[0].ways_to(said[1])
        again = BareNode(lab, 0, tmp_path, "public")
        stack.callback(again.end)
        assert again.said()["addresses"][0] == address
        until = time.monotonic() + 60
        while not (ways := homes[0].ways_to(said[1])):
            assert time.monotonic() < until
        assert all(map(is_circuit, ways))


def test_an_address_that_only_other_peers_observe_is_found_and_announced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(Plan(network=NETWORK, nat={1: "forward"}, path=Path_(rtt_ms=10)), 2))
        first = BareNode(lab, 0, tmp_path, "public")
        stack.callback(first.end)
        cloud = BareNode(lab, 1, tmp_path, "auto", first.said()["addresses"][0])
        stack.callback(cloud.end)
        said = cloud.said()
        outside = f"/ip4/{lab.address(1)}/tcp/31337"
        assert place_of(said["addresses"][0]) == outside != f"/ip4/{lab.inside(1)}/tcp/31337"
        assert not any(map(is_circuit, said["addresses"]))


def test_a_check_reports_a_public_address(tmp_path: Path) -> None:
    with LabSwarm(HOMES, 4, tmp_path, warm=True) as swarm:
        found = check(swarm, PUBLIC)
        assert found.returncode == 0, found.stdout + found.stderr
        place = f"/ip4/{swarm.lab.address(PUBLIC)}/tcp/31400"
        assert f"has dialled {place}" in found.stdout and "warn  reachability" not in found.stdout
        assert "no peer trains 'demo' there yet" in found.stdout


def check(swarm: LabSwarm, host: int) -> subprocess.CompletedProcess[str]:
    """``noloco-peer check`` with the peers' configuration."""
    sets = [*SETS, "peer.network.port=31400", "peer.network.upnp=false", f"run.dir={swarm.folder}", "peer.device=cpu"]
    words = [word for it in sets for word in ("--set", it)]
    command = [sys.executable, "-m", "peer", "check", "--config", "configs/demo.yaml", *words]
    command = swarm.lab.command(host, [*command, "--initial-peers", swarm.address])
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
