"""How long peers wait for one that is slow, late, killed, frozen or about to leave, and with whom they go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peer.rounds.progress import LATE_SLACK
from peer.swarm.grouping.matchmaking import JOIN_SECONDS
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder

PHASE, STEPS = 1.0, 10  # seconds and inner steps of a phase
MACHINE = Machine(PHASE / STEPS, latency=0.005, up=1e7, down=1e7, skew=0.0, starts=0.0)
EVENT = 20.0  # seconds
AFTER = 90.0  # seconds: longer than all peers run
WHOLE = 40.0  # seconds


def swarm(kind: Kind, *machines: Machine, fault: str = "", who: int = 0) -> Scenario:
    """``fault``: happens to ``who`` at ``EVENT`` and lasts until the end."""
    faults = (Fault(EVENT, fault, (who,), AFTER, 1),) if fault else ()
    return Scenario(0, kind, machines, faults, WHOLE, inner_steps=STEPS, numel=300, codec="none")


def by_id(count: int) -> list[int]:
    """The numbers of the peers in the order of their ids: the first one leads."""
    with in_a_folder(swarm("group", *[MACHINE] * count)) as world:
        return sorted(range(count), key=lambda it: world.peers[it].host.peer_id)


def waits(world: World, number: int, since: float = 0.0) -> list[float]:
    """Seconds at each boundary, from the third on and after ``since``, until its group or its partner was there."""
    return [row["seconds"]["match"] for at, row in rows(world, number) if at > since]


def rows(world: World, number: int) -> list[tuple[float, dict]]:  # type: ignore[type-arg]
    """Each round from the third on, with the time of its end; without the last, in which others leave."""
    found, at = [], 0.0
    for row in world.rounds(world.peers[number]):
        at += sum(row["seconds"].values())
        found.append((at, row))
    return found[2:-1]


def partners(world: World, number: int, since: float = 0.0) -> list[int]:
    """With how many others it merged at each of these boundaries."""
    met = [row for at, row in rows(world, number) if at > since]
    return [len(row["partner"].split(",")) if row["outcome"] == "merged" else 0 for row in met]


def test_a_group_waits_for_its_slowest_member_and_no_longer() -> None:
    slow = replace(MACHINE, step_seconds=1.6 * MACHINE.step_seconds)
    with in_a_folder(swarm("group", MACHINE, MACHINE, slow, MACHINE)) as world:
        world.run()
        assert all(set(partners(world, number)) == {3} for number in range(4))
        assert all(0.5 * PHASE < it < 0.8 * PHASE for number in (0, 1, 3) for it in waits(world, number))
        assert max(waits(world, 2)) < 0.1 * PHASE


def test_members_wait_for_a_leader_that_is_slower_than_the_silence_limit() -> None:
    """Without keep-alive messages it was dropped after 20 s of silence, and the others averaged without it."""
    first = by_id(3)[0]
    slow = replace(MACHINE, step_seconds=25 * MACHINE.step_seconds)
    machines = [slow if number == first else MACHINE for number in range(3)]
    # round 6 ends at 140 s, or at 163 s when the first one is of all and not of each alone (seeds 0 to 6)
    with in_a_folder(replace(swarm("group", *machines), seconds=190.0)) as world:
        world.run()
        for peer in world.peers:
            met = [row["partner"] for row in world.rounds(peer) if 2 <= row["round"] <= 6]
            assert [str(it).count("peer") for it in met] == [2] * 5


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("fault", "seconds"), [("crash", 2.0), ("freeze", 30.0)])
def test_a_group_goes_on_without_a_member_that_dies_or_freezes(fault: str, seconds: float, place: int) -> None:
    """A death is noticed by its connection, a freeze by a deadline."""
    victim = by_id(3)[place]
    scenario = replace(swarm("group", *[MACHINE] * 3, fault=fault, who=victim), seconds=WHOLE + seconds)
    with in_a_folder(scenario) as world:
        world.run()
        for number in {0, 1, 2} - {victim}:
            assert max(waits(world, number, EVENT)) < seconds
            assert set(partners(world, number, EVENT + seconds)) == {1}


def be_patient(world: World, seconds: float) -> None:
    for peer in world.peers:
        rendezvous = peer.config.run.rendezvous.model_copy(update={"patience": seconds})
        run = peer.config.run.model_copy(update={"rendezvous": rendezvous})
        peer.config = peer.config.model_copy(update={"run": run})


def test_a_phase_may_be_longer_than_the_patience_of_a_group() -> None:
    """Whoever was slower than the leader was let go as it came to its boundary, and accused."""
    usual = replace(MACHINE, step_seconds=30 * MACHINE.step_seconds)
    last = by_id(4)[-1]
    slow = replace(usual, step_seconds=1.1 * usual.step_seconds)
    machines = [slow if number == last else usual for number in range(4)]
    with in_a_folder(replace(swarm("group", *machines), seconds=400.0)) as world:
        be_patient(world, 8.0)
        assert not world.run().violations
        assert all(len(met := partners(world, number)) > 6 and set(met) == {3} for number in range(4))


def test_a_group_waits_for_nobody_longer_than_its_patience() -> None:
    slow = replace(MACHINE, step_seconds=30 * MACHINE.step_seconds)
    with in_a_folder(swarm("group", MACHINE, MACHINE, slow)) as world:
        be_patient(world, 2.0)
        world.run()
        for number in (0, 1):
            assert max(waits(world, number)) < 2.0 + 0.5
            assert set(partners(world, number)) == {1}


def test_a_single_peer_waits_for_nobody() -> None:
    with in_a_folder(swarm("group", MACHINE)) as world:
        world.run()
        assert max(waits(world, 0)) < 0.1


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_a_partner_that_dies_costs_a_pair_little(kind: Kind) -> None:
    """Its record stays in the directory."""
    with in_a_folder(swarm(kind, *[MACHINE] * 4, fault="crash", who=3)) as world:
        world.run()
        for number in range(3):
            assert max(waits(world, number, EVENT)) < 3.0
            assert sum(partners(world, number, EVENT)) >= 6


def test_who_agrees_to_meet_and_does_not_come_costs_the_announced_wait() -> None:
    with in_a_folder(swarm("blocking", MACHINE, replace(MACHINE, lie="no-show"), MACHINE, MACHINE)) as world:
        world.run()
        longest = [max(waits(world, number)) for number in (0, 2, 3)]
        assert LATE_SLACK / 2 < max(longest) < LATE_SLACK + 1.5 * 0.5 * PHASE + 0.5


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kind", ["blocking", "group"])
def test_nobody_waits_for_a_peer_that_is_asked_to_stop(kind: Kind, place: int) -> None:
    """It says so at once, before it writes its checkpoint, which takes long here."""
    slow = replace(MACHINE, step_seconds=4 * MACHINE.step_seconds)
    leaves = by_id(2)[place]
    stays = 1 - leaves
    with in_a_folder(swarm(kind, slow, slow)) as world:

        def leave() -> None:
            trainer: Any = world.peers[leaves].trainer
            if kind == "blocking" and trainer.boundary.presence.matchmaking._agreement.meeting is None:
                world.loop.call_later(0.05, leave)
                return
            trainer.saver.checkpoints._seconds = WHOLE  # of its write, and again of its publish
            world.peers[leaves].stop.request()

        world.loop.call_later(EVENT, leave)
        world.run()
        assert max(partners(world, stays)) == 1
        # a leader waits once for a member that its directory still has
        assert len(waits(world, stays, EVENT)) >= 3 and max(waits(world, stays, EVENT)) < JOIN_SECONDS + 0.1
