"""A process that stands still for long, as on a machine that sleeps, and goes on."""

from __future__ import annotations

from collections import defaultdict

import pytest

from peer.swarm.healing import STALE_ROUNDS
from tests.simulated.peer import SimulatedPeer
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder

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


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_it_meets_nobody_before_it_has_the_weights_of_those_that_have_trained_on(kind: Kind) -> None:
    """Within a phase that outlasts a look at the directory: at its boundary it merged weights of 20 rounds before with
    a member's, and only then took the others'.
    """
    frozen = Fault(230.0, "freeze", (0,), 1000.0, 0)
    with in_a_folder(Scenario(0, kind, (MACHINE,) * 4, (frozen,), 1500.0, 100, 300, "none")) as world:
        assert not world.run().violations
        own, *others = (_merges(world, peer) for peer in world.peers)
    assert max(map(max, own.values())) > 25
    for partner, theirs in zip(world.peers[1:], others, strict=True):
        pairs = list(zip(own[partner.name], theirs["peer0"], strict=True))
        assert all(abs(mine - its) <= STALE_ROUNDS for mine, its in pairs), pairs


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_two_that_slept_take_the_weights_of_those_that_have_trained_on(kind: Kind) -> None:
    """Both were at the same old round, so they met, and neither was late from then on: they ended 20 rounds behind."""
    frozen = tuple(Fault(230.0, "freeze", (it,), 1000.0, 0) for it in range(2))
    with in_a_folder(Scenario(0, kind, (MACHINE,) * 6, frozen, 1700.0, 100, 300, "none")) as world:
        assert not world.run().violations
        last = [world.rounds(peer)[-1]["round"] for peer in world.peers]
    assert min(last[2:]) > 30 and max(last) - min(last) <= STALE_ROUNDS, last


def _merges(world: World, peer: SimulatedPeer) -> dict[str, list[int]]:
    """Its rounds in which it has merged with each other peer."""
    found = defaultdict[str, list[int]](list)
    for row in world.rounds(peer):
        if row["outcome"] == "merged":
            found[row["partner"]].append(row["round"])
    return found


def test_the_step_in_which_it_was_frozen_does_not_keep_a_pair_apart() -> None:
    """A phase of 25 s looked as long as 3,000 s then: after the swap that broke, each avoided the other for 20
    minutes.
    """
    slow = Machine(0.5, latency=0.02, up=3e3, down=3e3, skew=0.0, starts=0.0)
    frozen = Fault(106.0, "freeze", (0,), 300.0, 0)  # while they swap
    with in_a_folder(Scenario(0, "overlapped", (slow,) * 2, (frozen,), 700.0, 50, 3000, "none")) as world:
        assert not world.run().violations
        for peer in world.peers:
            outcomes = [row["outcome"] for row in world.rounds(peer)]
            assert "timeout" in outcomes and outcomes[-3:-1] == ["merged"] * 2
