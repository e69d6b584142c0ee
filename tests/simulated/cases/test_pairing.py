"""How often a peer finds a partner, in swarms in which it once failed to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hivemind.utils import MSGPackSerializer

from peer import clock
from peer.config.digest import digest
from peer.config.schema import Config
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.p2p.dht.search import id_of
from peer.p2p.stream import MESSAGE_TIMEOUT
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group
from peer.swarm.context import Decline
from peer.swarm.directory import buckets, records
from peer.swarm.directory.records import MemberRecord
from peer.swarm.pairing.agreement import Agreement
from peer.swarm.pairing.matchmaking import PairMatchmaking
from peer.swarm.pairing.proposals import Proposals
from peer.swarm.presence import Presence
from tests.simulated.harm import lies
from tests.simulated.p2p.dht import Value
from tests.simulated.runtime import EPOCH
from tests.simulated.scenario import Fault, Kind, Machine, Scenario
from tests.simulated.world import World, in_a_folder
from tests.unit.parts import member_record


def swarm(*machines: Machine, seconds: float, faults: tuple[Fault, ...] = ()) -> Scenario:
    return Scenario(0, "overlapped", machines, faults, seconds, inner_steps=10, numel=300, codec="none")


def machine(step_seconds: float, latency: float = 0.0005) -> Machine:
    return Machine(step_seconds, latency, up=1e7, down=1e7, skew=0.0, starts=0.0)


def shares(world: World, who: Callable[[int], bool] = lambda number: True, since: float = 0.0) -> dict[str, float]:
    """Share of each outcome in the rounds of these peers after the first minute's start. ``since``: inner steps."""
    rows = [row for number, peer in enumerate(world.peers) if who(number) for row in world.rounds(peer)[4:]]
    outcomes = [row["outcome"] for row in rows if row["step"] > since]
    assert len(outcomes) > 30
    return {outcome: outcomes.count(outcome) / len(outcomes) for outcome in ("merged", "alone", "timeout")}


@pytest.mark.parametrize("seed", [0, *(pytest.param(it, marks=pytest.mark.long) for it in (1, 2))])
def test_nobody_announces_a_boundary_for_the_time_of_its_running_swap(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap takes most of a phase here. Whoever was told so waited for nothing, and avoided the peer."""
    said: list[tuple[str, float, float]] = []  # by whom, when, and the time that it announced
    swaps: list[tuple[str, float, float]] = []  # of whom, from, to
    commit, swap = Agreement.commit, OverlappedPairExchange._swap

    def hear(self: Agreement, stream: Any, name: str, answer: Any, own_eta: float) -> None:
        said.append((name, clock.monotonic(), clock.monotonic() + answer.eta))
        commit(self, stream, name, answer, own_eta)

    def watched(self: OverlappedPairExchange, group: Group, *more: Any, **others: Any) -> Averaged:
        began = clock.monotonic()
        try:
            return swap(self, group, *more, **others)
        finally:
            swaps.append((group.links[0].name, began, clock.monotonic()))

    monkeypatch.setattr(Agreement, "commit", hear)
    monkeypatch.setattr(OverlappedPairExchange, "_swap", watched)
    line = Machine(4.0, latency=0.01, up=7300.0, down=3e5, skew=0.0, starts=0.0)
    scenario = Scenario(
        seed, "overlapped", (line,) * 3, (), 1600.0, inner_steps=10, numel=200_000, codec="int8", steps=200
    )
    with in_a_folder(scenario) as world:
        assert not world.run().violations
    late = 0.1 * 10 * 4.0  # what a swap takes is an estimate
    false = [
        (name, at, until)
        for name, when, at in said
        for other, began, until in swaps
        if name == other and began + 0.5 < when < until and at < until - late
    ]
    assert len(swaps) > 20 and not false, false


@pytest.mark.parametrize("seed", [0, *(pytest.param(it, marks=pytest.mark.long) for it in (1, 2))])
def test_on_lines_that_a_swap_fills_nobody_cuts_it_or_misses_a_meeting(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps of 0.7 to 1.5 phases. A peer that proposed to its own partner hung up when the answer came late behind the
    swap: 2 of 5 rounds. One whose swap was late postponed its boundary without a word, and was avoided for it.
    """
    missed: list[float] = []
    avoid, chance = PairMatchmaking.avoid, random.Random(seed)

    def avoided(self: PairMatchmaking, peer_id: str, *, offence: bool, late: bool = False) -> None:
        missed.append(clock.monotonic())
        avoid(self, peer_id, offence=offence, late=late)

    monkeypatch.setattr(PairMatchmaking, "avoid", avoided)
    line = Machine(4.0, latency=0.01, up=6500.0, down=3e5, skew=0.0, starts=0.0)
    seconds = 1200.0
    scenario = Scenario(seed, "overlapped", (line,) * 4, (), seconds, inner_steps=10, numel=200_000, codec="int8")
    with in_a_folder(scenario) as world:

        def change() -> None:
            for peer in world.peers:
                peer.host.up = line.up * chance.uniform(0.6, 1.25)
            world.loop.call_later(60.0, change)

        change()
        assert not world.run().violations
        rows = [row for peer in world.peers for row in world.rounds(peer) if row["step"] < 0.9 * seconds / 4.0]
        outcomes = [row["outcome"] for row in rows]
    assert len(missed) <= 1 and outcomes.count("timeout") == 0
    assert outcomes.count("merged") > 0.75 * len(outcomes) > 30


def test_a_partner_from_which_nothing_comes_for_a_step_is_not_hung_up_on() -> None:
    """Steps of 20 s, and its parts come once a step; or all have come, and this peer's own are still on their way."""
    line = Machine(20.0, latency=0.02, up=25_000.0, down=750_000.0, skew=0.0, starts=0.0)
    machines = tuple(replace(line, up=250_000.0 if number % 2 else line.up) for number in range(4))
    seconds = 1100.0
    scenario = Scenario(0, "overlapped", machines, (), seconds, inner_steps=10, numel=3_000_000, codec="int8")
    with in_a_folder(scenario) as world:
        assert not world.run().violations
        rows = [row for peer in world.peers for row in world.rounds(peer) if row["step"] < 0.8 * seconds / 20.0]
        outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("timeout") == 0 < 10 < outcomes.count("merged")  # 16 now; 6 time-outs then, in 1600 s


def test_a_fast_peer_among_many_slow_ones_asks_others_than_those_that_have_declined() -> None:
    """It asked the eight met longest ago again and again: slow ones, which had other meetings."""
    fast = 4
    with in_a_folder(swarm(*[machine(0.1)] * fast, *[machine(0.28)] * 14, seconds=60.0)) as world:
        world.run()
        assert shares(world, lambda number: number < fast)["alone"] < 0.4  # 0.73 then, 0.21 now


@pytest.mark.long
def test_on_lines_with_latency_it_asks_all_before_it_asks_one_again() -> None:
    """After four answers it asked the first slow one again, and never those as fast as itself (seed 1027)."""
    fast = 6
    with in_a_folder(swarm(*[machine(0.1, 0.006)] * fast, *[machine(0.24, 0.006)] * 18, seconds=90.0)) as world:
        world.run()
        assert shares(world, lambda number: number < fast)["alone"] < 0.45  # 0.58 then, 0.37 now


def test_a_fast_peer_that_began_apart_from_slow_ones_meets_them_although_it_is_far_ahead() -> None:
    """They were to take its weights first, but one of two others is not most of them: it was alone for ever."""
    apart = Fault(1.1, "split", (0,), 60.0, 0)
    with in_a_folder(swarm(machine(0.5), machine(1.3), machine(1.3), seconds=500.0, faults=(apart,))) as world:
        world.run()
        assert shares(world, lambda number: number == 0)["merged"] > 0.1  # 0 then, 0.25 now


def test_a_partner_that_evaluates_is_waited_for_and_one_that_has_left_is_not_met() -> None:
    """Steps of 3 s: an evaluation takes as long. An overlapped peer loses nothing while it waits."""
    with in_a_folder(swarm(*[machine(3.0, latency=0.05)] * 8, seconds=500.0)) as world:
        world.run()
        found = shares(world)
        assert found["timeout"] < 0.05  # 0.13 then, none now


def test_a_member_that_does_not_answer_keeps_no_other_from_meeting() -> None:
    """Its record lasts for 30 s, and each ask took as long as a whole inner phase."""
    gone = Fault(40.0, "cut", (6,), 120.0, 0)
    with in_a_folder(swarm(*[machine(0.4, latency=0.08)] * 7, seconds=160.0, faults=(gone,))) as world:
        world.run()
        assert shares(world, lambda number: number < 6)["alone"] < 0.34  # 0.37 to 0.42 then, 0.28 now


def test_a_peer_that_waits_for_an_answer_accepts_a_proposal_meanwhile() -> None:
    """Answers take a quarter of an inner phase: all waited for one, and declined each other."""
    paces = (0.18, 0.13, 0.15, 0.17)
    four = swarm(*[machine(pace, latency=0.08) for pace in paces], seconds=300.0)
    with in_a_folder(replace(four, kind="blocking")) as world:
        world.run()
        assert shares(world)["alone"] < 0.2  # 0.39 then, 0.04 now


def lies_after(world: World, number: int, lie: str, seconds: float) -> None:
    """An honest peer turns bad."""

    def turn() -> None:
        peer = world.peers[number]
        assert peer.trainer is not None
        peer.lie = lie
        lies.in_exchange(lie, peer.trainer)

    world.loop.call_later(seconds, turn)


@pytest.mark.parametrize(("kind", "turns"), [("overlapped", 0.0), ("blocking", 60.0)])
def test_a_member_that_comes_to_no_meeting_is_left_out(kind: Kind, turns: float) -> None:
    """It accepted every proposal and made its own, so two others that met it at each boundary never met. One that
    ``turns`` bad had been a good partner: it was left out for one phase each time.
    """
    absent = replace(machine(0.3), lie="" if turns else "no-show")
    three = swarm(machine(0.3), machine(0.31), absent, seconds=300.0)
    with in_a_folder(replace(three, kind=kind)) as world:
        if turns:
            lies_after(world, 2, "no-show", turns)
        assert not world.run().violations
        found = shares(world, lambda number: number < 2, since=turns / 0.3)
        assert found["alone"] < 0.4  # 0.98 then, 0.08 to 0.16 now; 0.59 and 0.07 of one that turns


def test_a_member_that_calls_off_each_meeting_when_its_partner_is_there_is_left_out() -> None:
    """And proposed another one at once: nothing was noted of either."""
    fickle = replace(machine(0.3), lie="calls off")
    with in_a_folder(swarm(machine(0.3), machine(0.31), fickle, seconds=300.0)) as world:
        world.run()
        assert shares(world, lambda number: number < 2)["alone"] < 0.4  # 0.73 then, 0.02 now


@pytest.mark.parametrize(("turns", "seconds"), [(0.0, 500.0), (60.0, 700.0)])
def test_a_member_whose_swaps_all_time_out_is_left_out(turns: float, seconds: float) -> None:
    """It sent a header and then nothing, and it was met again as soon as the swap had timed out. One that ``turns`` bad
    had been a good partner: that was no offence, however often.
    """
    silent = replace(machine(1.0), lie="" if turns else "silent")
    with in_a_folder(swarm(machine(1.0), machine(1.03), silent, seconds=seconds)) as world:
        if turns:
            lies_after(world, 2, "silent", turns)
        assert not world.run().violations
        found = shares(world, lambda number: number < 2, since=turns / 1.0)
        assert found["merged"] > 0.7  # 0.31 then, 0.8 now; 0.45 and 0.79 of one that turns


@pytest.mark.parametrize(("count", "most"), [(4, 0.8), (8, 0.5)])
def test_a_member_that_proposes_first_is_not_everybodys_only_partner(count: int, most: float) -> None:
    """It proposed to all at once after each boundary, met them all, and sent back what it got: no two others met."""
    first = replace(machine(0.2, latency=0.005), lie=lies.FIRST)
    members = [machine(0.2, latency=0.005)] * (count - 1)
    with in_a_folder(replace(swarm(*members, first, seconds=160.0), kind="blocking")) as world:
        world.run()
        rows = [row for peer in world.peers[:-1] for row in world.rounds(peer)[8:-1]]
        partners = [row["partner"] for row in rows if row["outcome"] == "merged"]
    assert len(partners) > 0.9 * len(rows) > 100
    assert partners.count(world.peers[-1].name) < most * len(partners)  # all of them then, 0.72 and 0.38 now


def test_who_never_came_costs_each_member_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out for one inner phase, then for two: in a minute of the siege it cost each member five rounds."""
    missed: list[str] = []
    avoid = PairMatchmaking.avoid

    def note(self: PairMatchmaking, peer_id: str, **how: Any) -> None:
        missed.append(self._node.member.name)
        avoid(self, peer_id, **how)

    monkeypatch.setattr(PairMatchmaking, "avoid", note)
    absent = replace(machine(0.17), lie="no-show")
    with in_a_folder(replace(swarm(*[machine(0.17)] * 5, absent, seconds=60.0), kind="blocking")) as world:
        world.run()
        assert max(map(missed.count, missed)) <= 4


def test_a_member_that_says_to_be_a_million_rounds_further_moves_nobody() -> None:
    """Four of four took its weights with its step, and ended as if their run was over."""
    boasts = replace(machine(0.3), lie="boast")
    newcomer = replace(machine(0.3), starts=60.0)
    with in_a_folder(swarm(*[machine(0.3)] * 3, boasts, newcomer, seconds=150.0)) as world:
        world.run()
        for number in (0, 1, 2, 4):
            rows = world.rounds(world.peers[number])
            assert len(rows) > 20 and max(row["round"] for row in rows) < 200
        assert shares(world, lambda number: number != 3)["merged"] > 0.5


@pytest.mark.parametrize(("phase_seconds", "count", "after"), [(20.0, 5, 4.9), (3.0, 1, 2.9), (3.0, 40, 0.0)])
def test_members_that_decline_every_proposal_keep_no_others_from_meeting(
    phase_seconds: float, count: int, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were never met, so they were asked first in each round: 0.12 and 0.57 of the rounds were merged, or a peer
    waited 1.6 s for its partner. ``after``: seconds in which they answer.
    """
    honest, answer, propose = 6, Proposals.answer, Proposals._propose
    members, decliners = [machine(phase_seconds / 10)] * honest, [machine(phase_seconds / 10)] * count

    async def answers(self: Proposals, stream: Any) -> None:
        if int(self._node.member.name.removeprefix("peer")) < honest:
            await answer(self, stream)
        else:
            await asyncio.sleep(after)
            await stream.send_last(Decline(reason="has a meeting"), MESSAGE_TIMEOUT)

    async def proposes(self: Proposals, whom: MemberRecord) -> None:
        if int(self._node.member.name.removeprefix("peer")) < honest:
            await propose(self, whom)

    monkeypatch.setattr(Proposals, "answer", answers)
    monkeypatch.setattr(Proposals, "_propose", proposes)
    with in_a_folder(replace(swarm(*members, *decliners, seconds=25 * phase_seconds), kind="blocking")) as world:
        world.run()
        found = shares(world, lambda number: number < honest)
        waits = [row["seconds"]["match"] for peer in world.peers[:honest] for row in world.rounds(peer)[4:-1]]
    assert found["merged"] > 0.9 and fmean(waits) < 0.6, (found, fmean(waits))


@pytest.mark.parametrize("lie", [False, True])
def test_members_of_another_configuration_take_no_partners_from_the_others(
    lie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same run's name. They were asked first, because they were never met. Some claim the right digest
    (``lie``) and refuse all the same.
    """
    asked: list[tuple[str, str]] = []  # who by whom
    propose, record = Proposals._propose, Presence._record

    async def hear(self: Proposals, whom: MemberRecord) -> None:
        asked.append((whom.name, self._node.member.name))
        await propose(self, whom)

    own, foreign = [machine(0.2, latency=0.02)] * 2, [machine(2.0, latency=0.02)] * 16
    with in_a_folder(swarm(*own, *foreign, seconds=60.0)) as world:
        config, others = digest(world.peers[0].config.run), {peer.name for peer in world.peers[len(own) :]}
        for peer in world.peers[len(own) :]:
            changed = peer.config.model_dump()
            changed["run"]["exchange"]["stall"] = 11.0
            peer.config = Config.model_validate(changed)
        monkeypatch.setattr(Proposals, "_propose", hear)
        if lie:
            monkeypatch.setattr(Presence, "_record", lambda it: record(it).model_copy(update={"config": config}))
        world.run()
        assert shares(world, lambda number: number < len(own))["merged"] > 0.9  # 0 then, 1 now
    asked_in_vain = [whom for whom, by in asked if whom in others and by not in others]
    assert bool(asked_in_vain) == lie


@pytest.mark.long
def test_members_that_do_not_exist_displace_none_of_those_that_were_met() -> None:
    """Their records filled the directory: peers asked them first, at three seconds each, and no pair was formed."""
    with in_a_folder(swarm(*[machine(0.12)] * 6, seconds=200.0)) as world:
        ghosts = [world.network.add(0.01, 1e7, 1e7) for _ in range(1500)]
        world.network.cut([peer.host for peer in world.peers], ghosts)  # who calls them waits

        def flood() -> None:
            until = EPOCH + world.loop.time() + records.LIFETIME
            for ghost in ghosts:
                said = member_record(ghost.peer_id).model_copy(update={"config": digest(world.peers[0].config.run)})
                for bucket in buckets.own_buckets(ghost.peer_id)[:8]:
                    for node in world.nodes.values():
                        value = Value(MSGPackSerializer.dumps(records.encode(said)), until)
                        node._keep(id_of(records.members_key("simulated", bucket)), ghost.peer_id, value, until - 1)
            world.loop.call_later(records.LIFETIME, flood)

        world.loop.call_later(100.0, flood)
        world.run()
        rows = [row for peer in world.peers for row in world.rounds(peer) if row["step"] > 120.0 / 0.12]
        assert len(rows) > 100 and sum(row["outcome"] == "merged" for row in rows) > 0.9 * len(
            rows
        )  # 0.76 then, 0.98 now
