"""A process that stands still for long, as on a machine that sleeps, and goes on."""

from __future__ import annotations

import pytest

from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import in_a_folder

MACHINE = Machine(0.5, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)
H, ASLEEP = 10, Fault(30.0, "freeze", (0,), 400.0, 0)


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_it_takes_the_weights_of_those_that_have_trained_on(kind: Kind) -> None:
    """It went on 80 rounds behind the others, with their learning rate of that time, to the end of the run and
    alone. After a pause or a restart it did not.
    """
    with in_a_folder(Scenario(0, kind, (MACHINE,) * 4, (ASLEEP,), 500.0, H, 300, "none")) as world:
        assert not world.run().violations
        own, *others = (world.rounds(peer) for peer in world.peers)
        theirs = max(rows[-1]["step"] for rows in others)
    assert theirs > 800 and theirs - own[-1]["step"] < 3 * H
