"""Direct connections between real peers on hosts of their own, with and without a firewall that drops their packets."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Access, Path_, Plan
from tests.swarm.support.harness import TINY

pytestmark = pytest.mark.needs("laboratory", "iptables")
LINE = Plan(access=Access(up_mbit=100, down_mbit=100), path=Path_(rtt_ms=20))
PORT, DIRECT = 31338, 31339
MODEL = ["run.model.hidden_size=512", "run.model.intermediate_size=1024", "run.steps=100000", "run.inner_steps=20"]
FELL_BACK = "no direct connection, parts go over the p2p stream"


def iptables(swarm: LabSwarm, host: int, *words: str) -> str:
    command = swarm.lab.command(host, ["iptables", *words])
    return subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout


def carried(swarm: LabSwarm) -> int:
    """Bytes that have come to the ports for direct connections."""
    listed = [iptables(swarm, host, "-L", "COUNT", "-nvx") for host in (1, 2)]
    return sum(int(line.split()[1]) for text in listed for line in text.splitlines() if f":{DIRECT}" in line)


def train(swarm: LabSwarm, rules: Sequence[str], *sets: str) -> int:
    """Until each peer has merged twice, behind a firewall with ``rules``; returns the bytes that each has sent."""
    for host in (1, 2):
        iptables(swarm, host, "-N", "COUNT")
        iptables(swarm, host, "-A", "COUNT", "-p", "tcp", "--dport", str(DIRECT))
        iptables(swarm, host, "-A", "INPUT", "-j", "COUNT")
        if rules:
            iptables(swarm, host, "-A", "INPUT", *rules)
    for host, name in ((1, "a"), (2, "b")):
        swarm.peer(host, name, "configs/demo.yaml", (*TINY, *MODEL, *sets, f"peer.network.port={PORT}"))

    def merged(name: str) -> list[int]:
        return [row["bytes_sent"] for row in swarm.tail(name).rounds if row["outcome"] == "merged"]

    swarm.wait_for(lambda: min(len(merged("a")), len(merged("b"))) >= 2, 240)
    return min(merged("a")[0], merged("b")[0])


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_parts_go_over_the_direct_port(tmp_path: Path, overlap: str) -> None:
    with LabSwarm(LINE, 2, tmp_path, warm=True) as swarm:
        sent = train(swarm, (), f"run.exchange.overlap={overlap}")
        assert sent > 8 * 2**20 and carried(swarm) > sent  # one of the two directions; requests are few
        assert FELL_BACK not in (tmp_path / "a.log").read_text() + (tmp_path / "b.log").read_text()


@pytest.mark.parametrize("verdict", ["DROP", "REJECT"])
def test_behind_a_firewall_swaps_go_over_the_p2p_stream(tmp_path: Path, verdict: str) -> None:
    with LabSwarm(LINE, 2, tmp_path, warm=True) as swarm:
        sent = train(swarm, ("-p", "tcp", "--dport", str(DIRECT), "-j", verdict))
        assert sent > 8 * 2**20 and carried(swarm) < 10_000  # what dialling takes, and no part
        logs = [(tmp_path / f"{name}.log").read_text() for name in ("a", "b")]
        assert sum(text.count(FELL_BACK) for text in logs) in (1, 2)  # each side dials once
