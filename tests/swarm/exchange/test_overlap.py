"""Overlapped swaps, as they are by default: no peer waits, and the death of a partner costs nothing."""

from __future__ import annotations

import signal
from statistics import median

import pytest

from peer.config.schema import ExchangeConfig
from tests.swarm.support.harness import Swarm, wait_for

DEFAULT = ExchangeConfig()
RUN = (f"run.exchange.codec={DEFAULT.codec}", f"run.exchange.overlap={str(DEFAULT.overlap).lower()}")
RUN = (*RUN, "run.inner_steps=200", "run.exchange.stall=3")
TOKENS = 32  # of an inner step


@pytest.mark.smoke
def test_swaps_run_during_the_inner_steps(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    names = ("a", "b", "c")
    sets = (*RUN, "run.steps=3000", "peer.start_with=3")
    peers = {name: swarm.peer(name, *sets, address=address) for name in names}
    for process in peers.values():
        assert process.exit_code(120) == 0, process.output()
        assert "Traceback" not in process.output()
    for name in names:
        rows = swarm.rounds(name)
        trained = [row for row in rows if row["train_loss"] is not None]  # the last swaps have no inner steps
        merged = [row for row in trained if row["outcome"] == "merged"]
        assert len(merged) >= 5, [(row["outcome"], row["detail"]) for row in rows]
        assert rows[-1]["step"] == 3000
        early = [row["seconds"] for row in rows if row["step"] <= 2800]
        assert sum(it["match"] + it["exchange"] for it in early) < 0.06 * sum(sum(it.values()) for it in early)
        rate = median(row["tokens_per_second"] for row in merged)  # a row's own is low when the machine stood still
        for row in merged:  # in seconds: a faster machine makes more steps during a swap
            assert row["staleness"] * TOKENS / rate < 0.5, row
        assert trained[-1]["train_loss"] < trained[0]["first_train_loss"] - 1


def test_a_partner_that_is_killed_in_a_swap_costs_nothing(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    sets = (*RUN, "run.steps=100000", "peer.start_with=3")
    peers = {name: swarm.peer(name, *sets, address=address) for name in ("a", "b", "c")}
    for name in peers:
        swarm.wait_for_rounds(name, 3)
    peers["c"].signal(signal.SIGKILL)
    before = len(swarm.rounds("a"))
    wait_for(
        lambda: sum(row["partner"] == "b" and row["outcome"] == "merged" for row in swarm.rounds("a")[before:]) >= 2,
        60,
        lambda: peers["a"].output(),
    )
    peers["a"].signal(signal.SIGTERM)
    peers["b"].signal(signal.SIGINT)
    for name in ("a", "b"):
        assert peers[name].exit_code(60) == 0, peers[name].output()
        rows = swarm.rounds(name)
        assert all(row["seconds"]["match"] + row["seconds"]["exchange"] < 5 for row in rows)
        assert "Traceback" not in peers[name].output()
    again = swarm.start("again", swarm.train("a", *RUN, "run.steps=100000"))
    resumed = int(again.line(r"resumed: .* step=(\d+)").group(1))
    assert resumed >= 600
    swarm.wait_for_rounds("a", len(swarm.rounds("a")) + 1)
