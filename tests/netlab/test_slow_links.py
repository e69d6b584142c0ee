"""Real peers on slow and failing links: a swap that takes longer than an inner phase, and a link that breaks down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Access, Path_, Plan
from tests.netlab.tun import possible
from tests.swarm.harness import TINY

pytestmark = pytest.mark.skipif(bool(possible()), reason=possible() or "-")
SLOW = Plan(access=Access(up_mbit=1.0, down_mbit=1.0), path=Path_(rtt_ms=40))


def test_nobody_waits_for_a_swap_that_takes_longer_than_an_inner_phase(tmp_path: Path) -> None:
    sets = (*TINY, "run.model.hidden_size=64", "run.model.layers=2", "run.steps=1600", "run.inner_steps=40")
    sets = (*sets, "run.exchange.overlap=true", "run.evaluation.every_rounds=100")
    with LabSwarm(SLOW, 2, tmp_path) as swarm:
        processes = [swarm.peer(host, name, "configs/demo.yaml", sets) for host, name in ((1, "a"), (2, "b"))]
        for process in processes:
            assert process.wait(150) == 0, (tmp_path / "a.log").read_text()
        for name in ("a", "b"):
            rows = [row for row in swarm.tail(name).rounds if row["step"] <= 1500]
            merged = [row for row in rows if row["outcome"] == "merged"]
            assert len(merged) >= 3, [(row["step"], row["outcome"], row["detail"]) for row in rows]
            assert len(rows) < 30  # of 37: rounds went on for more than one inner phase
            assert sum(row["seconds"]["exchange"] + row["seconds"]["match"] for row in rows) < 1.0


def test_a_link_that_breaks_down_is_given_up_by_what_swaps_have_taken_so_far(tmp_path: Path) -> None:
    sets = (*TINY, "run.steps=100000", "run.inner_steps=150", "run.exchange.timeout=60", "run.exchange.stall=30")
    with LabSwarm(SLOW, 2, tmp_path) as swarm:
        for host, name in ((1, "a"), (2, "b")):
            swarm.peer(host, name, "configs/demo.yaml", sets)

        def outcomes(name: str) -> list[str]:
            return [row["outcome"] for row in swarm.tail(name).rounds]

        swarm.wait_for(lambda: outcomes("a").count("merged") >= 3)
        for host in (1, 2):
            swarm.lab.set_access(host, 0.01, 0.01)
        swarm.wait_for(lambda: "timeout" in outcomes("a") or "timeout" in outcomes("b"), 60)
        rows = [row for name in ("a", "b") for row in swarm.tail(name).rounds]
        worst = max(row["seconds"]["exchange"] for row in rows if row["outcome"] == "timeout")
        assert worst < 15  # neither the ceiling of 60 s nor the 30 s without a byte
        for host in (1, 2):
            swarm.lab.set_access(host, 1.0, 1.0)
        before = outcomes("a").count("merged")
        swarm.wait_for(lambda: outcomes("a").count("merged") > before, 90)
