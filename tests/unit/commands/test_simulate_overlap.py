"""Overlapped swaps in the simulator: deterministic, nearly as good as waiting, and equal to it when nothing is late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from peer.commands.simulate.exchanges import OverlappedSwap, swap
from peer.commands.simulate.options import Method, Options
from peer.commands.simulate.replica import Replica
from peer.config.schema import CodecName, ExchangeConfig
from peer.errors import UserError
from tests.unit import parts
from tests.unit.commands.simulate_harness import config, replica_of, simulate, without_clock
from tests.unit.late_device import LateDevice


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_an_overlapped_swap_is_the_same_whatever_the_threads_and_nearly_as_good(codec: CodecName) -> None:
    exchange = ExchangeConfig(overlap=True, codec=codec)
    run = {"exchange": exchange, "steps": 48, "inner_steps": 8}
    one = without_clock(simulate(run=run, swap_steps=3, workers=1))
    assert one == without_clock(simulate(run=run, swap_steps=3, workers=3))
    waited = simulate(run={**run, "exchange": ExchangeConfig(overlap=False, codec=codec)})
    assert one["swarm"]["val_loss_mean"] == pytest.approx(waited["swarm"]["val_loss_mean"], rel=0.02)
    assert one["swarm"]["val_loss_mean"] != waited["swarm"]["val_loss_mean"]
    assert one["swarm"]["tokens"] == waited["swarm"]["tokens"]
    assert bytes_a_swap(one) == pytest.approx(bytes_a_swap(waited), rel=0.02)


def bytes_a_swap(summary: Any) -> float:
    rows = summary["peers"].values()
    return float(summary["swarm"]["bytes_sent"] / sum(row["rounds"]["merged"] for row in rows))


def test_the_last_phases_are_not_shorter_than_a_swap() -> None:
    """They were swaps without staleness: the peer makes no such phase (rounds/progress.py)."""
    run = {"steps": 48, "inner_steps": 8}
    rounds = [
        sum(simulate(run={**run, "exchange": exchange}, swap_steps=4)["peers"]["replica-0"]["rounds"].values())
        for exchange in (ExchangeConfig(overlap=False, codec="none"), ExchangeConfig(overlap=True, codec="none"))
    ]
    assert rounds[0] - rounds[1] == 2  # phases of 2, 1 and 1 steps, and one of 4


def test_a_swap_is_shorter_than_a_phase() -> None:
    chosen = config(exchange=ExchangeConfig(), inner_steps=6)
    assert Options(4, Method.NOLOCO).overlap(chosen.run) == 3
    assert Options(4, Method.NOLOCO).overlap(config(exchange=ExchangeConfig(), inner_steps=50).run) == 8
    assert Options(4, Method.NOLOCO).overlap(config(inner_steps=6).run) == 0
    with pytest.raises(UserError, match=r"--swap-steps 6: below run.inner_steps \(6\)"):
        Options(4, Method.NOLOCO, swap_steps=6).check(chosen)


def test_an_overlapped_swap_of_no_steps_is_the_swap_that_is_waited_for() -> None:
    def pair() -> list[Replica]:
        pair = [replica_of(str(seed), 100, 4) for seed in range(2)]
        for seed, replica in enumerate(pair):
            replica.state.stream = parts.stream(seed)
            replica.inner_phase()
        return pair

    waited, overlapped = pair(), pair()
    for replica, mean in zip(waited, swap(*waited)[0], strict=True):
        replica.apply(mean)
    OverlappedSwap(*overlapped, steps=3).run()  # their phases are over: nothing is trained meanwhile
    for one, other in zip(waited, overlapped, strict=True):
        theta = [parameters_to_vector(it.state.inner.model.parameters()) for it in (one, other)]
        torch.testing.assert_close(*theta, atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(one.state.outer.momentum, other.state.outer.momentum, atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(one.state.outer.slow.phi, other.state.outer.slow.phi, atol=1e-7, rtol=1e-5)


def test_the_simulator_waits_for_what_it_has_fetched_from_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened each part at once, with whatever the host's memory held before the copy."""
    pair = [replica_of(str(seed), 100, 4) for seed in range(2)]
    for seed, replica in enumerate(pair):
        replica.state.stream = parts.stream(seed)
        replica.inner_phase()
    with LateDevice(monkeypatch) as device:
        for replica in pair:
            device.side_of(replica.state.outer.slow)
        OverlappedSwap(*pair, steps=3).run()
    assert "host waits" in device.calls
    for replica in pair:
        assert replica.state.outer.slow.phi.isfinite().all()
