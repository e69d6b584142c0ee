"""Pauses: a peer finishes its swap, is met by nobody, waits for nothing, and comes back as one that was away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peer.p2p.deadline import LEAVING_SECONDS
from peer.telemetry.run_log import Row
from tests.simulated.harm.faults import Faults
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder

BEGIN, LENGTH, END = 40.0, 120.0, 160.0  # seconds of the pause
GRACE = 25.0  # seconds: a swap that runs, and two inner phases
KINDS = ("blocking", "overlapped", "group")
KnownKind = pytest.mark.parametrize("kind", KINDS)


def swarm(kind: Kind, *faults: Fault, count: int = 5) -> Scenario:
    machine = Machine(0.4, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)
    return Scenario(0, kind, (machine,) * count, faults, 260.0, inner_steps=10, numel=300, codec="none")


def steps_over_time(world: World, number: int) -> list[tuple[float, int, str]]:
    """Time, step and state in its record, each second of virtual time; filled while the world runs."""
    seen: list[tuple[float, int, str]] = []

    def look() -> None:
        trainer = world.peers[number].trainer
        if trainer is not None:
            state = trainer.member.presence._record().state
            seen.append((world.loop.time(), trainer.state.inner.step, state))
        world.loop.call_later(1.0, look)

    world.loop.call_later(1.0, look)
    return seen


def merged(world: World, number: int) -> list[Row]:
    return [row for row in world.rounds(world.peers[number]) if row["outcome"] == "merged"]


@KnownKind
def test_others_go_on_while_a_peer_is_paused_and_it_comes_back_to_their_round(kind: Kind) -> None:
    with in_a_folder(swarm(kind, Fault(BEGIN, "pause", (1,), LENGTH, 0))) as world:
        seen = steps_over_time(world, 1)
        report = world.run()
        assert report.violations == []
        rest = [(step, state) for at, step, state in seen if BEGIN + GRACE < at < END]
        assert len(set(rest)) == 1 and rest[0][1] == "paused"  # no step
        before = max(step for at, step, _ in seen if at < BEGIN)
        after = [(at, step) for at, step, state in seen if at > END + GRACE and state == "training"]
        others = min(trainer_rounds(world, number) for number in (0, 2, 3, 4))
        assert after[0][1] > before + 200  # the others made some 300 steps meanwhile
        assert after[-1][1] > after[0][1]
        rows = world.rounds(world.peers[1])
        late = [row for row in rows if row["step"] >= after[0][1]]
        assert [row["outcome"] for row in late].count("merged") > len(late) / 2
        assert rows[-1]["round"] > others - 4
        for number in (0, 2, 3, 4):  # nobody waits for it, and five less one pair up
            mine = world.rounds(world.peers[number])
            assert [row["outcome"] for row in mine].count("merged") > 0.6 * len(mine)
        paused = sum(row["seconds"]["paused"] for row in rows)
        assert paused == pytest.approx(LENGTH, abs=GRACE)
        assert max(row["idle_share"] for row in rows[5:]) < 0.6  # the pause is no idle time


def trainer_rounds(world: World, number: int) -> int:
    return int(world.rounds(world.peers[number])[-1]["round"])


@KnownKind
def test_all_pauses_at_once_end_at_once(kind: Kind) -> None:
    """Nobody is left of whom to take a state: each goes on with its own."""
    all_of_them = tuple(Fault(BEGIN, "pause", (number,), LENGTH, 0) for number in range(4))
    with in_a_folder(swarm(kind, *all_of_them, count=4)) as world:
        report = world.run()
        assert report.violations == []
        for number in range(4):
            assert len(merged(world, number)) > 20


def test_a_newcomer_takes_the_state_of_a_swarm_in_which_all_are_paused() -> None:
    machine = Machine(0.4, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)
    late = Machine(0.4, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=100.0)
    pauses = tuple(Fault(BEGIN, "pause", (number,), LENGTH, 0) for number in range(2))
    world_of = Scenario(0, "overlapped", (machine, machine, late), pauses, 300.0, 10, 300, "none")
    with in_a_folder(world_of) as world:
        seen = steps_over_time(world, 2)
        report = world.run()
        assert report.violations == []
        assert seen[0][1] > 50  # it did not begin anew
        assert len(merged(world, 2)) > 5


@KnownKind
def test_a_paused_peer_leaves_at_once_and_comes_back_from_its_checkpoint(kind: Kind) -> None:
    leaves = Fault(BEGIN + 60, "leave", (1,), 0.0, 0)
    with in_a_folder(swarm(kind, Fault(BEGIN, "pause", (1,), LENGTH, 0), leaves)) as world:
        ended: list[float] = []

        def look() -> None:
            process = world.peers[1].process
            if process is not None and process.dead and not ended:
                ended.append(world.loop.time())
            world.loop.call_later(0.1, look)

        world.loop.call_later(1.0, look)
        report = world.run()
        assert report.violations == []
        assert ended[0] < BEGIN + 60 + 2.0
        assert world.peers[1].lives == 2 and len(merged(world, 1)) > 10


def test_when_the_leader_of_a_group_pauses_another_one_leads_at_once() -> None:
    with in_a_folder(swarm("group")) as world:
        leader = min(range(5), key=lambda number: world.peers[number].host.peer_id)
        pause = Fault(BEGIN, "pause", (leader,), LENGTH, 0)
        world.loop.call_later(BEGIN, Faults(world).happen, pause)
        counts: dict[float, int] = {}
        other = (leader + 1) % 5
        for at in (BEGIN, BEGIN + 40):
            world.loop.call_later(at, lambda at=at: counts.update({at: len(world.rounds(world.peers[other]))}))
        report = world.run()
        assert report.violations == []
        rows = world.rounds(world.peers[other])[counts[BEGIN] : counts[BEGIN + 40]]
        assert len(rows) > 6  # of 4 s each: nobody waits for long
        assert [row["outcome"] for row in rows].count("merged") >= len(rows) - 1, rows


def test_a_leader_that_pauses_while_it_waits_for_others_costs_nobody_a_round() -> None:
    """It sent a roster of those that were ready: whoever was late was alone, and took the weights of the others."""
    usual, slow = (Machine(it, 0.02, 1e6, 1e6, 0.0, 0.0) for it in (0.4, 1.0))
    with in_a_folder(swarm("group")) as world:
        leader, *_, last = sorted(range(5), key=lambda number: world.peers[number].host.peer_id)
    machines = tuple(slow if number == last else usual for number in range(5))
    with in_a_folder(replace(swarm("group"), machines=machines)) as world:
        paused: list[float] = []
        counts: dict[int, int] = {}

        def look() -> None:
            trainer: Any = world.peers[leader].trainer
            leads = trainer is not None and trainer.boundary.presence.matchmaking._leads
            if leads and world.loop.time() > BEGIN and not paused:
                paused.append(world.loop.time())
                Faults(world).happen(Fault(paused[0], "pause", (leader,), LENGTH, 0))
            world.loop.call_later(1.0, look)

        world.loop.call_later(1.0, look)
        world.loop.call_later(BEGIN, lambda: counts.update({it: len(world.rounds(world.peers[it])) for it in range(5)}))
        assert not world.run().violations
        assert paused
        at = world.rounds(world.peers[leader])[counts[leader]]
        assert at["detail"] == "asked to stop"
        for number in (it for it in range(5) if it != leader):
            row = world.rounds(world.peers[number])[counts[number]]
            assert row["outcome"] == "merged" and str(row["partner"]).count("peer") == 3, row


def test_a_group_does_not_wait_for_a_member_that_pauses_within_its_phase() -> None:
    """It would for one and a half times what the member has announced."""
    slow = replace(swarm("group"), machines=(Machine(2.0, 0.02, 1e6, 1e6, 0.0, 0.0),) * 5, seconds=300.0)
    with in_a_folder(slow) as world:
        last = max(range(5), key=lambda number: world.peers[number].host.peer_id)  # not the leader
        paused: list[float] = []

        def look() -> None:
            trainer = world.peers[last].trainer
            middle = trainer is not None and trainer.state.inner.step == trainer.state.counters.boundary_step + 3
            if middle and world.loop.time() > 100 and not paused:
                paused.append(world.loop.time())
                Faults(world).happen(Fault(world.loop.time(), "pause", (last,), 100.0, 0))
            world.loop.call_later(0.5, look)

        world.loop.call_later(1.0, look)
        before: dict[int, int] = {}
        world.loop.call_later(100.0, lambda: before.update({it: len(world.rounds(world.peers[it])) for it in range(5)}))
        report = world.run()
        assert report.violations == [] and paused
        for number in (it for it in range(5) if it != last):
            rows = world.rounds(world.peers[number])[before[number] : before[number] + 3]
            assert max(row["seconds"]["match"] for row in rows) < 6.0, rows  # those of one speed wait for each other


def test_a_pause_does_not_wait_for_a_swap_that_takes_long() -> None:
    machines = (Machine(2.0, 0.02, 1e6, 1e6, 0.0, 0.0),) * 2
    trickle = tuple(Fault(63.5, "trickle", (number,), 236.5, 0) for number in range(2))
    slow = Scenario(0, "overlapped", machines, trickle, 500.0, inner_steps=30, numel=2000, codec="none")
    with in_a_folder(slow) as world:
        asked: list[float] = []
        rested: list[float] = []

        def look() -> None:
            peer, now = world.peers[0], world.loop.time()
            boundary: Any = peer.trainer.boundary if peer.trainer is not None else None
            if now > 62 and not asked and boundary is not None and boundary._swap is not None:
                asked.append(now)
                Faults(world).happen(Fault(now, "pause", (0,), 120.0, 0))
            if peer.pause.resting and not rested:
                rested.append(now)
            world.loop.call_later(0.5, look)

        world.loop.call_later(1.0, look)
        report = world.run()
        assert report.violations == []
        assert rested[0] - asked[0] < LEAVING_SECONDS + 10.0  # a step, the swap, a checkpoint; the swap may take 240 s
