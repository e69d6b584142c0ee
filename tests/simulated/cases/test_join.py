"""A newcomer without a configuration asks the swarm what it trains, as ``noloco-peer join ADDRESS`` does."""

from __future__ import annotations

from functools import partial

import pytest

from peer.config.digest import canonical
from peer.errors import RunError, UserError
from peer.p2p import greeting
from peer.swarm import configuration
from peer.swarm.configuration import OfferedRun
from tests.simulated.cases.test_pairing import machine, swarm
from tests.simulated.loop import Process
from tests.simulated.scenario import Fault
from tests.simulated.world import World, in_a_folder

ASKS = 20.0  # seconds: all members are there


def answer(world: World, monkeypatch: pytest.MonkeyPatch) -> OfferedRun | str | None:
    """What the newcomer learns, or the error that it gets."""
    host, found = world.network.add(0.02, 1e7, 1e7), list[OfferedRun | str | None]()
    own = world.peers[0].config.peer

    def ask() -> None:
        try:
            found.append(configuration.offered(own))
        except (RunError, UserError) as error:
            found.append(str(error))

    monkeypatch.setattr(greeting, "MemberNode", partial(world.node, host=host))
    host.process = Process("newcomer")
    world.loop.call_later(ASKS, world.runtime.start, host.process, ask)
    world.run()
    (one,) = found
    return one


@pytest.mark.parametrize("fault", ["freeze", "cut", "crash"])
def test_it_learns_the_configuration_although_members_do_not_answer(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tuple(Fault(ASKS - 1.0, fault, (number,), 30.0, 1) for number in (0, 1))
    with in_a_folder(swarm(*[machine(0.1)] * 4, seconds=60.0, faults=lost)) as world:
        found = answer(world, monkeypatch)
        assert isinstance(found, OfferedRun), found
        assert found.text == canonical(world.peers[0].config.run)
        assert found.agreeing == found.members and found.name == "simulated"


def test_it_is_told_in_one_line_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = (Fault(ASKS - 1.0, "split", (0, 1, 2), 30.0, 0),)  # from the bootstrap node and the newcomer
    with in_a_folder(swarm(*[machine(0.1)] * 3, seconds=60.0, faults=lost)) as world:
        found = answer(world, monkeypatch)
        assert isinstance(found, str) and "no member of simulated has sent the configuration" in found
