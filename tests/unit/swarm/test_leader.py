"""The leader's decisions, which members it waits for, leaves out, and whose weights count."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from peer import clock
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.progress import LATE_SLACK
from peer.rounds.state import Lineage
from peer.rounds.transfer_rule import CATCH_UP_LEAST
from peer.rounds.types import Group, Seat
from peer.swarm.grouping import leader
from peer.swarm.grouping.leader import GroupLeader, JoinedMember
from peer.swarm.grouping.messages import LEADER_MESSAGE, JoinGroup, MemberReady, OutOfDate, Roster, WaitFor
from tests.unit.parts import context_of
from tests.unit.virtual import LATENCY, NOTHING, stream_pair, took
from tests.unit.virtual import run as in_virtual_time

ME = Seat("a", "peer-a")
X, OTHER = Lineage("x", 9), Lineage("other", 6)


class Harness:
    """A leader and the members' ends of its streams."""

    def __init__(self, patience: float = 600.0, *, equal: bool = True) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.missed: list[str] = []
        known: Any = SimpleNamespace(patience=lambda _: patience, missed=self.missed.append, own_seat=lambda: ME)
        self.progress, self.counters = SimpleNamespace(phase_seconds=0.0), SimpleNamespace(lineage=X)
        self.context: Any = SimpleNamespace(
            node=SimpleNamespace(background=self._spawn),
            boundary=SimpleNamespace(progress=self.progress, longest_phase_seconds=120.0),
            counters=self.counters,
            away=False,
        )
        self.leader = GroupLeader(self.context, known, equal=equal)
        self.ends: dict[str, Stream] = {}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def join(self, name: str, eta: float = 0.0, round: int = 3) -> Stream:
        theirs, ours = await stream_pair()
        ours.remote = name
        self.leader.admit(ours, JoinGroup(seat=Seat("claimed", f"peer-{name}"), round=round, eta=eta))
        self.ends[name] = theirs
        return theirs

    async def ready(self, name: str, lineage: Lineage = X, round: int = 3, eta: float = 0.0) -> Stream:
        end = self.ends.get(name) or await self.join(name, eta, round)
        await end.send(MemberReady(lineage=lineage), 1)
        await asyncio.sleep(5 * LATENCY)  # it has arrived
        return end

    async def gather(
        self, lineage: Lineage = X, *, round: int = 3, phase_seconds: float = 0.0, seconds: float = math.inf
    ) -> Group:
        self.counters.lineage, self.progress.phase_seconds = lineage, phase_seconds
        return await self.leader.gather(round, clock.monotonic() + seconds)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for end in self.ends.values():
            end.close()


async def decision(end: Stream, timeout: float = 5.0) -> Any:
    """The next message that is not ``WaitFor``."""
    while isinstance(said := await end.receive(LEADER_MESSAGE, timeout), WaitFor):
        pass
    return said


def run(scene: Any, play: Callable[[Coroutine[Any, Any, None]], None] = in_virtual_time, **options: Any) -> None:
    async def perform() -> None:
        harness = Harness(**options)
        try:
            await scene(harness)
        finally:
            await harness.close()

    play(perform())


async def test_who_has_waited_for_another_leader_before_does_not_wait_twice_as_long() -> None:
    """Two hostile members, one that leads and forms no group and one that then announces a boundary of far away, made
    a peer wait for longer than its main thread does: it ended.
    """
    harness = Harness()
    await harness.join("late", eta=1e6)
    began = clock.monotonic()
    group = await harness.gather(seconds=7.0)
    assert clock.monotonic() - began == pytest.approx(7.0, abs=1.0)  # and not 600
    assert not group.links


@pytest.mark.parametrize("play", [in_virtual_time, asyncio.run], ids=["memory", "sockets"])
def test_all_that_are_ready_are_in_the_roster_in_the_order_of_their_ids(
    play: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scene(harness: Harness) -> None:
        for name in ("d", "b", "c"):
            await harness.ready(name)
        group = await harness.gather()
        assert [link.peer_id for link in group.links] == ["b", "c", "d"]
        assert group.assembly is not None
        assert sorted(group.assembly.controls) == [1, 2, 3]
        said = [await decision(harness.ends[name]) for name in ("b", "c", "d")]
        assert all(isinstance(it, Roster) and it == said[0] for it in said)
        assert [member.peer_id for member in said[0].members] == ["a", "b", "c", "d"]
        assert group.assembly.token == said[0].token

    run(scene, play)


async def test_one_that_comes_late_is_waited_for_and_the_others_are_told_for_whom() -> None:
    harness = Harness()
    ready, late = await harness.ready("b"), await harness.join("c", eta=60)
    gathering = asyncio.ensure_future(harness.gather())
    said = await ready.receive(LEADER_MESSAGE, 5)
    assert isinstance(said, WaitFor) and said.names == "peer-c"
    assert said.seconds == pytest.approx(1.5 * 60 + LATE_SLACK, abs=NOTHING)
    await late.send(MemberReady(lineage=X), 1)
    assert len((await gathering).links) == 2


async def test_one_that_does_not_come_or_dies_is_left_out() -> None:
    harness = Harness()
    await harness.ready("b")
    await harness.join("c", eta=0)  # says that it is here, and then nothing
    dies = await harness.join("d", eta=1000)
    began = clock.monotonic()
    gathering = asyncio.ensure_future(harness.gather())
    await asyncio.sleep(0.2)
    dies.close()
    group = await gathering
    assert [link.peer_id for link in group.links] == ["b"]
    assert clock.monotonic() - began == took(LATE_SLACK)
    assert harness.missed == ["c"]
    with pytest.raises(StreamLost):
        await decision(harness.ends["c"])


async def test_a_member_whose_stream_ends_after_it_was_ready_is_left_out() -> None:
    """Nobody read its stream: a leader took it for a holder of the group's weights at every boundary."""
    harness = Harness()
    await harness.ready("b", lineage=OTHER)
    (await harness.ready("c", lineage=X)).close()
    await asyncio.sleep(1.0)
    group = await harness.gather(lineage=OTHER)
    assert group.donor is None and [link.peer_id for link in group.links] == ["b"]


async def test_members_that_come_one_after_the_other_keep_the_others_no_longer_than_all_expect() -> None:
    """Each comes within its time, has other weights, and does not come back with the group's."""
    harness = Harness(patience=50.0)
    ended, began = [], clock.monotonic()
    await harness.ready("b")
    await harness.join("stray 0", eta=1e6)
    gathering = asyncio.ensure_future(harness.gather())
    gathering.add_done_callback(lambda _: ended.append(clock.monotonic() - began))
    for number in range(5):
        await asyncio.sleep(40.0)
        await harness.join(f"stray {number + 1}", eta=1e6)
        await harness.ready(f"stray {number}", lineage=OTHER)
    assert [link.peer_id for link in (await gathering).links] == ["b"]
    assert ended == [took(50.0 + CATCH_UP_LEAST, more=leader.KEEP_ALIVE)]


async def test_the_patience_is_a_limit_to_what_a_member_announces() -> None:
    harness = Harness(patience=20.0)
    await harness.ready("b")
    await harness.join("c", eta=1e6)
    began = clock.monotonic()
    assert len((await harness.gather()).links) == 1
    assert clock.monotonic() - began == took(20.0)


@pytest.mark.parametrize(("comes", "merges"), [(101.0, True), (119.0, True), (121.0, False)])
@pytest.mark.parametrize("again", [False, True])
async def test_the_patience_counts_from_the_leaders_boundary(again: bool, comes: float, merges: bool) -> None:
    """It counted from the join, at the start of an inner phase: where that was longer, each member that came later than
    its leader was let go at once, and accused.
    """
    harness = Harness(patience=20.0)
    began = clock.monotonic()
    await harness.join("b", eta=100.0)
    if again:
        await asyncio.sleep(50.0)
        await harness.join("b", eta=50.0)
    await asyncio.sleep(began + 100.0 - clock.monotonic())
    gathering = asyncio.ensure_future(harness.gather())
    await asyncio.sleep(began + comes - clock.monotonic())
    assert gathering.done() is not merges
    if merges:
        await harness.ready("b")
    assert [link.peer_id for link in (await gathering).links] == ["b"] * merges
    assert harness.missed == ["b"] * (not merges)


async def test_a_seat_is_held_no_longer_than_the_longest_phase_and_the_patience() -> None:
    """One that joins for a round far ahead is awaited in none, so its seat was its own for as long as it said."""
    harness = Harness(patience=20.0)
    end = await harness.join("b", eta=1e6, round=10**6)
    await asyncio.sleep(120.0 + 20.0)
    assert not end.ended
    await asyncio.sleep(5.0)
    with pytest.raises(StreamLost):
        await end.receive(LEADER_MESSAGE, 1.0)


async def test_who_joins_again_and_again_gains_no_time() -> None:
    """Each time it had the whole patience anew, so all waited for it for as long as the leader does, every round."""
    harness = Harness(patience=20.0)
    await harness.ready("b")
    began = clock.monotonic()
    await harness.join("again", eta=1e6)
    gathering = asyncio.ensure_future(harness.gather())
    for _ in range(6):
        await asyncio.sleep(4.0)
        await harness.join("again", eta=1e6)
    assert [link.peer_id for link in (await gathering).links] == ["b"]
    assert clock.monotonic() - began < 20.0 + 4.0 + 1.0 and harness.missed == ["again"]
    await harness.join("again", eta=1e6)  # the next round
    await harness.ready("again")
    assert [link.peer_id for link in (await harness.gather()).links] == ["again"]


@pytest.mark.parametrize("meanwhile", [GroupLeader.close, GroupLeader.round_began], ids=["paused", "another led"])
async def test_who_joins_for_a_later_round_has_its_whole_time(meanwhile: Callable[[GroupLeader], None]) -> None:
    """Of a peer that led again, each member had waited since it joined for the round that this peer did not lead: who
    came to its boundary a little later than the leader was let go at once.
    """
    harness = Harness(patience=20.0)
    await harness.ready("b", eta=10.0)
    await harness.join("c", eta=10.0)
    gathering = asyncio.ensure_future(harness.gather(lineage=OTHER))
    await asyncio.sleep(1.0)  # it has waited for them
    harness.ends.pop("c").close()
    assert (await gathering).donor is not None
    harness.ends.pop("b").close()
    meanwhile(harness.leader)
    await asyncio.sleep(100.0)
    for name in ("b", "c"):
        await harness.join(name, eta=1.0)
    await harness.ready("b")
    gathering = asyncio.ensure_future(harness.gather())
    await asyncio.sleep(1.0)
    await harness.ready("c")
    assert [link.peer_id for link in (await gathering).links] == ["b", "c"] and not harness.missed


async def test_who_waits_hears_every_second_that_the_leader_lives() -> None:
    harness = Harness(patience=20.0)
    ready = await harness.ready("b")
    await harness.join("c", eta=1e6)
    gathering = asyncio.ensure_future(harness.gather())
    left = []
    while isinstance(said := await ready.receive(LEADER_MESSAGE, leader.KEEP_ALIVE + NOTHING), WaitFor):
        left.append(said.seconds)
    assert isinstance(said, Roster) and len(left) == 20
    assert left == [pytest.approx(20.0 - number * leader.KEEP_ALIVE, abs=NOTHING) for number in range(20)]
    await gathering


@pytest.mark.parametrize(("phase_seconds", "wait"), [(0.0, CATCH_UP_LEAST), (30.0, CATCH_UP_LEAST), (900.0, 900.0)])
async def test_a_stray_that_does_not_come_back_with_the_weights_is_left_out(phase_seconds: float, wait: float) -> None:
    """A large model has long inner phases, and its state takes as long."""
    harness = Harness()
    stray = await harness.ready("b", lineage=OTHER)
    await harness.ready("c")
    began = clock.monotonic()
    gathering = asyncio.ensure_future(harness.gather(phase_seconds=phase_seconds))
    assert isinstance(await decision(stray), OutOfDate)
    assert [link.peer_id for link in (await gathering).links] == ["c"]
    assert clock.monotonic() - began == took(wait)


async def test_who_joins_for_the_next_round_already_is_not_waited_for_and_not_forgotten() -> None:
    harness = Harness()
    await harness.ready("b", round=3)
    await harness.join("c", eta=1000, round=4)
    assert len((await harness.gather(round=3)).links) == 1
    assert harness.leader.present == {"c"}
    await harness.ready("c", round=4)
    assert [link.peer_id for link in (await harness.gather(round=4)).links] == ["c"]


async def test_the_time_of_who_joins_for_the_next_round_begins_with_that() -> None:
    harness = Harness(patience=20.0)
    await harness.ready("b", round=3)
    await harness.join("c", eta=100.0, round=4)
    assert [link.peer_id for link in (await harness.gather(round=3)).links] == ["b"]
    await asyncio.sleep(100.0)
    gathering = asyncio.ensure_future(harness.gather(round=4))
    await asyncio.sleep(1.0)
    await harness.ready("c", round=4)
    assert [link.peer_id for link in (await gathering).links] == ["c"] and not harness.missed


async def test_a_leader_whose_own_count_is_behind_waits_all_the_same() -> None:
    harness = Harness()
    await harness.ready("b", round=9)
    assert len((await harness.gather(round=3)).links) == 1


async def test_a_stray_takes_the_weights_of_the_leader_and_is_then_in_the_roster() -> None:
    harness = Harness()
    stray = await harness.ready("b", lineage=OTHER)
    await harness.ready("c")
    gathering = asyncio.ensure_future(harness.gather())
    said = await decision(stray)
    assert isinstance(said, OutOfDate) and said.donor.peer_id == "a"
    await stray.send(MemberReady(lineage=X), 1)
    assert len((await gathering).links) == 2


async def test_many_strays_take_the_weights_of_different_members() -> None:
    """A member gives its weights to two at a time."""
    harness = Harness()
    strays = [await harness.ready(name, lineage=OTHER) for name in ("b", "c", "d", "e")]
    await harness.ready("f")
    gathering = asyncio.ensure_future(harness.gather())
    donors = [(await decision(stray)).donor.peer_id for stray in strays]
    assert donors == ["a", "f", "a", "f"]
    for stray in strays:
        await stray.send(MemberReady(lineage=X), 1)
    assert len((await gathering).links) == 5


async def test_one_that_comes_back_with_other_weights_again_is_left_out() -> None:
    harness = Harness()
    stray = await harness.ready("b", lineage=OTHER)
    await harness.ready("c")
    gathering = asyncio.ensure_future(harness.gather())
    assert isinstance(await decision(stray), OutOfDate)
    await stray.send(MemberReady(lineage=Lineage("other still", 9)), 1)
    assert [link.peer_id for link in (await gathering).links] == ["c"]


async def test_a_leader_that_is_behind_is_sent_off_itself_while_the_others_hear_that_it_lives() -> None:
    harness = Harness()
    members = [await harness.ready(name, lineage=Lineage("right", 10)) for name in ("b", "c")]
    group = await harness.gather(lineage=Lineage("wrong", 7))
    assert group.donor is not None
    for end in members:
        while (said := await end.receive(LEADER_MESSAGE, 3)).names != "peer-a":  # before, it waited for peer-c
            assert isinstance(said, WaitFor)
    again = {(await harness.gather(lineage=Lineage("wrong", 7))).donor for _ in range(20)}
    assert {seat.peer_id for seat in again if seat is not None} == {"b", "c"}  # one of them may fail
    assert len((await harness.gather(lineage=Lineage("right", 10))).links) == 2


@pytest.mark.parametrize(
    ("own", "others", "reference"),
    [
        (("x", 6), [("y", 6), ("y", 6)], "y"),  # as much work: what most have
        (("x", 9), [("y", 5), ("y", 5)], "x"),  # more work, though most have another: they begin from older checkpoints
        (("", 0), [("", 0), ("", 0), ("x", 1)], "x"),  # a peer that has trained, among many that have not
    ],
)
async def test_the_lineage_that_counts(own: tuple[str, int], others: list[tuple[str, int]], reference: str) -> None:
    harness = Harness()
    for name, lineage in zip("bcd", others, strict=False):
        await harness.ready(name, Lineage(*lineage))
    await asyncio.sleep(0.1)
    assert harness.leader._outdated(Lineage(*own))[0].digest == reference


async def test_unequal_replicas_may_have_made_other_rounds() -> None:
    harness = Harness(equal=False)
    await harness.ready("b", lineage=X._replace(contributions=6))
    await harness.ready("c", lineage=X._replace(contributions=12))
    assert len((await harness.gather()).links) == 2


@pytest.mark.parametrize("leads", [False, True])
async def test_one_unequal_replica_gives_the_others_no_weights(leads: bool) -> None:
    """It said to have done more, and all others took its state at each round. Who has trained less is a donor, too."""
    honest, liar = Lineage("x", 600), Lineage("zz", 51200)
    harness = Harness(equal=False)
    own, other = (liar, honest) if leads else (honest, liar)
    members = {"b": honest, "c": Lineage("x", 590), "d": honest, "e": other, "f": Lineage("x", 0)}
    for name, lineage in members.items():
        await harness.ready(name, lineage)
    await asyncio.sleep(0.1)
    reference, outdated = harness.leader._outdated(own)
    assert reference == honest and harness.leader._must_update(own, reference) is leads
    assert [it.seat.peer_id for it in outdated] == ([] if leads else ["e"])
    holders = [it.peer_id for it in harness.leader._holders(reference)]
    assert holders == (["b", "c", "d", "e"] if leads else ["b", "c", "d"])


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("others", "own"),
    [
        ([("new", 0)] * 3, ("x", 1)),
        ([("new", 3)] * 3 + [("x", 2000)], ("x", 2000)),  # one round: they undid a thousand
        ([("new", 3)] * 3 + [("x", 2000), ("x", 0), ("x", 0)], ("x", 2000)),  # these two have nothing to lose
        ([("x", 2000)] * 2 + [("new", 3)] * 2, ("new", 3)),  # of the new ones, one leads
    ],
)
async def test_many_that_have_not_trained_undo_nothing(
    others: list[tuple[str, int]], own: tuple[str, int], equal: bool
) -> None:
    harness = Harness(equal=equal)
    for name, lineage in zip("bcdefg", others, strict=False):
        await harness.ready(name, Lineage(*lineage))
    await asyncio.sleep(0.1)
    assert harness.leader._outdated(Lineage(*own))[0].digest == "x"


@pytest.mark.parametrize(
    ("liars", "honest", "believed"), [(1, 2, False), (2, 4, False), (3, 6, False), (2, 3, True), (2, 1, True)]
)
async def test_up_to_a_third_of_unequal_replicas_give_the_others_no_weights(
    liars: int, honest: int, believed: bool
) -> None:
    """Two, three or more can say the same. A lone peer that has trained has no witness against two."""
    harness = Harness(equal=False)
    said = [Lineage("zz", 51200)] * liars + [Lineage("x", 600)] * (honest - 1)
    for name, lineage in zip("bcdefghi", said, strict=False):
        await harness.ready(name, lineage)
    await asyncio.sleep(0.1)
    assert harness.leader._outdated(Lineage("x", 600))[0].digest == ("zz" if believed else "x")


@pytest.mark.parametrize(("done", "alone"), [(0, 0), (9, 0), (9, 1)])
async def test_unequal_replicas_begin_with_the_same_weights(done: int, alone: int) -> None:
    """Those of another build, which drew other weights from the seed, had the others' changes on them for ever; so had
    those that had made a round ``alone``.
    """
    harness = Harness(equal=False)
    fresh, right = await harness.ready("b", lineage=Lineage("other", alone)), Lineage("x", done)
    if not done:
        await harness.ready("c", lineage=right)
    gathering = asyncio.ensure_future(harness.gather(lineage=right))
    assert isinstance(await decision(fresh), OutOfDate)
    await fresh.send(MemberReady(lineage=right), 1)
    assert len((await gathering).links) == (1 if done else 2)
    await harness.ready("e", lineage=right._replace(contributions=0))  # its first round was lost
    assert (await harness.gather(lineage=right._replace(contributions=9))).links
    await harness.join("d")
    await harness.ready("d", lineage=OTHER)
    found = await harness.gather(lineage=Lineage("mine", 0))  # now it is this peer that has no round
    assert found.donor is not None and found.donor.peer_id == "d"


async def test_a_leader_that_pauses_lets_its_members_go_and_counts_none_as_present() -> None:
    """It would not call them when it is back."""
    harness = Harness()
    members = [await harness.ready("b"), await harness.join("c", eta=1000)]
    harness.leader.close()
    assert harness.leader.present == set()
    for end in members:
        with pytest.raises(StreamLost):
            await decision(end)
    await harness.join("d")
    assert harness.leader.present == {"d"}


@pytest.mark.parametrize("late", [False, True])
async def test_a_leader_that_is_asked_to_stop_leaves_a_group_that_waits_for_somebody(late: bool) -> None:
    """It sent a roster of those that were ready. It did not always end that round, and who was late lost it."""
    harness = Harness()
    members = [await harness.ready("b")]
    if late:
        members.append(await harness.join("c", eta=100.0))
    gathering = asyncio.ensure_future(harness.gather())
    await asyncio.sleep(0.0)
    harness.context.away, began = True, clock.monotonic()
    group = await gathering
    assert [link.peer_id for link in group.links] == ["b"] * (not late)
    if late:
        assert group.lost and clock.monotonic() - began < leader.KEEP_ALIVE + NOTHING and not harness.missed
        for end in members:
            with pytest.raises(StreamLost):
                await decision(end)
    assert harness.leader.present == set()


async def test_a_member_that_leaves_as_its_message_comes_is_listened_to_no_more() -> None:
    """Its leaving was forgotten with the last news, and the task waited for ever."""
    ours, _ = await stream_pair()
    leader = GroupLeader(context_of(Mock(), Mock()), Mock(), equal=True)
    member = JoinedMember(ours, Seat("b", "b"), 1, clock.monotonic() + 9.0)

    async def received(*_: Any) -> MemberReady:
        member.leave()
        return MemberReady(lineage=Lineage("a"))

    ours.receive = received  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(60.0):
        await leader._listen(member)
