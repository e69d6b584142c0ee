"""Deadlines in virtual time: how long a peer waits is a fact of the protocol and not of the machine."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from peer.config.schema import ExchangeConfig
from peer.p2p import deadline
from peer.rounds.transfer_rule import swap_limit
from tests.simulated.loop import Process
from tests.simulated.scenario import Machine, Scenario
from tests.simulated.world import World, in_a_folder

MACHINE = Machine(step_seconds=0.5, latency=0.02, up=1e5, down=1e5, skew=0.0, starts=0.0)
LIMIT = swap_limit(ExchangeConfig().stall, ExchangeConfig().max_phases, 5.0)  # seconds: four stalls
TWO = Scenario(0, "blocking", (MACHINE, MACHINE), (), 120.0, inner_steps=10, numel=20_000, codec="none")


def seconds_of(world: World, outcome: str) -> list[float]:
    """How long each exchange with this outcome took, by the peers' own reports."""
    rows = [row for peer in world.peers for row in world.rounds(peer)]
    return [row["seconds"]["exchange"] for row in rows if row["outcome"] == outcome]


def dropped(scenario: Scenario, factor: float) -> tuple[list[float], list[float], list[str]]:
    """Seconds of the swaps that merged and of those that did not, where all lines are slower after a minute; and the
    promises that were broken.
    """
    with in_a_folder(scenario) as world:

        def drop() -> None:
            for peer in world.peers:
                peer.host.up, peer.host.chunk = peer.host.up / factor, 1024

        world.loop.call_later(60.0, drop)
        report = world.run()
        return seconds_of(world, "merged"), seconds_of(world, "timeout"), report.violations


def test_a_swap_on_a_line_that_drops_to_a_hundredth_ends_at_the_second_look() -> None:
    usual, broken, violations = dropped(TWO, 100)
    assert not violations
    assert len(usual) > 10 and 0.5 < max(usual) < 2  # 80 kB at 100 kB a second
    assert broken and max(broken) < LIMIT / 2 + 0.5


def test_a_swap_on_a_line_that_drops_to_a_thirtieth_takes_thirty_times_as_long_and_merges() -> None:
    usual, broken, violations = dropped(TWO, 30)
    assert not broken and not violations
    assert 20 < max(usual) < 30 < LIMIT


def test_a_swap_without_a_deadline_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_time(work: Awaitable[Any], *limits: object) -> Any:
        return await work

    monkeypatch.setattr(deadline, "in_time", in_time)
    _, _, violations = dropped(TWO, 100)
    assert len(violations) == 2 and "for what may take 40.0 s" in violations[0]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_partner_that_freezes_costs_no_more_than_the_announced_wait(overlapped: bool) -> None:
    """It froze in its inner phase, after both had agreed to meet."""
    kind = "overlapped" if overlapped else "blocking"
    with in_a_folder(replace(TWO, kind=kind, numel=300)) as world:

        def freeze() -> None:
            process = world.peers[1].process
            assert isinstance(process, Process)
            process.freeze()

        world.loop.call_later(62.0, freeze)
        world.loop.call_later(115.0, lambda: world.peers[1].process.thaw(world.loop))  # type: ignore[union-attr]
        world.run()
        rows = [row for row in world.rounds(world.peers[0]) if row["outcome"] != "merged"]
        waited = [row["seconds"]["match"] + row["seconds"]["exchange"] for row in rows]
    assert len(rows) >= 5  # it trains on alone
    assert max(waited) < (0.5 if overlapped else 20.0)
    assert sorted(waited)[len(waited) // 2] < 4.0  # after the first: only the search for another partner
