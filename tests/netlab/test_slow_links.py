"""Real peers on slow links: a swap longer than an inner phase, a link outage, a rate that drops during a swap."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Access, Path_, Plan
from tests.swarm.support.harness import TINY

pytestmark = pytest.mark.needs("laboratory")
SLOW = Plan(access=Access(up_mbit=1.0, down_mbit=1.0), path=Path_(rtt_ms=40))
HOME = Plan(access=Access(up_mbit=10, down_mbit=10), path=Path_(rtt_ms=40))


def test_no_peer_waits_for_a_swap_that_takes_longer_than_an_inner_phase(tmp_path: Path) -> None:
    # 60 phases of 0.4 s on a machine of any speed; a swap takes 3 s
    sets = (*TINY, "run.model.hidden_size=64", "run.model.layers=2", "run.steps=24000", "run.inner_steps=400")
    sets = (*sets, "run.inner_time=0.4", "run.exchange.overlap=true", "run.evaluation.every_rounds=100")
    with LabSwarm(SLOW, 2, tmp_path, warm=True) as swarm:
        processes = [swarm.peer(host, name, "configs/demo.yaml", sets) for host, name in ((1, "a"), (2, "b"))]
        for process in processes:
            assert process.wait(150) == 0, (tmp_path / "a.log").read_text()
        for name in ("a", "b"):
            rows = [row for row in swarm.tail(name).rounds if row["step"] <= 23000]
            merged = [row for row in rows if row["outcome"] == "merged"]
            assert len(merged) >= 3, [(row["step"], row["outcome"], row["detail"]) for row in rows]
            assert len(rows) < 45  # of 57: some rounds took more than one inner phase
            before_the_end = rows[:-2]  # the last swaps are waited for
            waited = sum(row["seconds"]["exchange"] + row["seconds"]["match"] for row in before_the_end)
            assert waited < 0.1 * sum(sum(row["seconds"].values()) for row in before_the_end)


def test_swaps_succeed_within_seconds_after_a_link_outage(tmp_path: Path) -> None:
    """TCP's retry intervals grow during the outage. Without a new connection swaps would fail long after its end."""
    sets = (*TINY, "run.model.hidden_size=128", "run.model.layers=4", "run.steps=100000", "run.inner_steps=100")
    sets = (*sets, "run.evaluation.every_rounds=1000", "run.exchange.stall=4")
    with LabSwarm(HOME, 2, tmp_path, warm=True) as swarm:
        for host, name in ((1, "a"), (2, "b")):
            swarm.peer(host, name, "configs/demo.yaml", sets)

        def merged() -> int:
            return sum(row["outcome"] == "merged" for row in swarm.tail("a").rounds)

        swarm.wait_for(lambda: merged() >= 2)
        swarm.lab.set_access(2, 0.02, 0.02)
        time.sleep(55)  # TCP retries 51 and 102 s after the link broke
        before = merged()
        swarm.lab.set_access(2, 10, 10)
        began = time.monotonic()
        swarm.wait_for(lambda: merged() > before)
        # usually 2 to 7 s; sometimes libp2p waits several of its dial backoffs in a row. TCP alone would take 47 s
        assert time.monotonic() - began < 40
