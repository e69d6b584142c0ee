"""``peer.start_with``: a swarm begins when all have seen one another, so that nobody comes late to its first rounds."""

from __future__ import annotations

import pytest

from peer.telemetry.run_log import Row
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder

PACE = 0.01  # seconds of a step: a round is over long before another peer looks at the directory again


def first_rounds(world: World, count: int) -> list[Row]:
    """The first round of each peer, of a swarm in which each waits for ``count``."""
    for peer in world.peers:
        own = peer.config.peer.model_copy(update={"start_with": count})
        peer.config = peer.config.model_copy(update={"peer": own})
    world.run()
    return [world.rounds(peer)[0] for peer in world.peers]


def swarm(seed: int, kind: Kind, *starts: float, faults: tuple[Fault, ...] = ()) -> Scenario:
    machines = tuple(Machine(PACE, 0.02, up=1e7, down=1e7, skew=0.0, starts=it) for it in starts)
    return Scenario(seed, kind, machines, faults, 40.0, inner_steps=10, numel=300, codec="none")


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
@pytest.mark.parametrize("at", [5.5, 6.5, 7.5, 8.5])
def test_all_begin_with_their_first_round(at: float, kind: Kind) -> None:
    """The machine of one is busy when the others see that all have come: they began, and it took their weights."""
    busy = Fault(at, "freeze", (0,), 13.0, 0)
    with in_a_folder(swarm(0, kind, 0.0, 1.0, 2.3, 4.1, faults=(busy,))) as world:
        rows = first_rounds(world, 4)
    assert [row["round"] for row in rows] == [1] * 4, rows


def test_one_more_than_was_waited_for_takes_the_weights_of_the_swarm() -> None:
    with in_a_folder(swarm(0, "blocking", 0.0, 0.5, 12.0)) as world:
        rows = first_rounds(world, 2)
    assert [row["round"] == 1 for row in rows] == [True, True, False], rows
