"""Real peers on slow and failing links: a swap that takes longer than an inner phase, and a link that breaks down."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Access, Path_, Plan
from tests.netlab.tun import possible
from tests.swarm.harness import TINY

pytestmark = pytest.mark.skipif(bool(possible()), reason=possible() or "-")
SLOW = Plan(access=Access(up_mbit=1.0, down_mbit=1.0), path=Path_(rtt_ms=40))


@pytest.mark.timeout(300)
def test_nobody_waits_for_a_swap_that_takes_longer_than_an_inner_phase(tmp_path: Path) -> None:
    sets = (*TINY, "run.model.hidden_size=64", "run.model.layers=2", "run.steps=2400", "run.inner_steps=40")
    sets = (*sets, "run.exchange.overlap=true", "run.evaluation.every_rounds=100")
    with LabSwarm(SLOW, 2, tmp_path) as swarm:
        processes = [swarm.peer(host, name, "configs/demo.yaml", sets) for host, name in ((1, "a"), (2, "b"))]
        for process in processes:
            assert process.wait(150) == 0, (tmp_path / "a.log").read_text()
        for name in ("a", "b"):
            rows = [row for row in swarm.tail(name).rounds if row["step"] <= 2300]
            merged = [row for row in rows if row["outcome"] == "merged"]
            assert len(merged) >= 3, [(row["step"], row["outcome"], row["detail"]) for row in rows]
            assert len(rows) < 45  # of 57: rounds went on for more than one inner phase
            before_the_end = rows[:-2]  # a round is reported when its swap has ended, and the last ones are waited for
            waited = sum(row["seconds"]["exchange"] + row["seconds"]["match"] for row in before_the_end)
            assert waited < 0.02 * sum(sum(row["seconds"].values()) for row in before_the_end)


@pytest.mark.timeout(420)
def test_a_link_that_breaks_down_is_given_up_by_what_swaps_have_taken_so_far(tmp_path: Path) -> None:
    model = ("run.model.hidden_size=64", "run.model.layers=2")  # a swap takes some 4 s, an inner phase one
    sets = (*TINY, *model, "run.steps=100000", "run.inner_steps=60", "run.exchange.timeout=60", "run.exchange.stall=30")
    with LabSwarm(SLOW, 2, tmp_path) as swarm:
        for host, name in ((1, "a"), (2, "b")):
            swarm.peer(host, name, "configs/demo.yaml", sets)

        def rows(outcome: str) -> list[dict[str, Any]]:
            return [row for name in ("a", "b") for row in swarm.tail(name).rounds if row["outcome"] == outcome]

        swarm.wait_for(lambda: len(rows("merged")) >= 6)
        usual = max(row["seconds"]["exchange"] for row in rows("merged"))
        for _ in range(4):  # the link must break in the middle of a swap, which is most of the time
            for host in (1, 2):
                swarm.lab.set_access(host, 0.01, 0.01)
            with suppress(RuntimeError):
                swarm.wait_for(lambda: bool(rows("timeout")), 8 * usual)
            for host in (1, 2):
                swarm.lab.set_access(host, 1.0, 1.0)
            if rows("timeout"):
                break
            time.sleep(2)
        # a few times what swaps have taken: neither the ceiling of 60 s nor the 30 s without a byte
        assert 0 < max(row["seconds"]["exchange"] for row in rows("timeout")) < 5 * usual + 3
