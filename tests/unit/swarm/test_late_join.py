"""A peer that began apart from its swarm finds it later: which weights go on?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer import clock
from peer.rounds.contribution import Averaged
from peer.rounds.state import State
from peer.rounds.types import Assembly, Group, Outcome, Seat
from peer.swarm.context import SwarmContext
from peer.swarm.directory.records import MemberRecord
from peer.swarm.healing import STALE_ROUNDS, DivergenceTracker, Origin, PositionBounds, Replacement
from peer.swarm.pairing.proposals import Proposals
from peer.swarm.presence import Presence
from tests.unit.parts import member_record

H = 25
ROUNDS = st.integers(0, 1000)
ROOTS = st.sampled_from(["", "a", "b", "c"])


def origin(since: int = 0, *, root: str = "a", alone: bool = False) -> Origin:
    made = Origin()
    made.note(alone=alone, taken=not alone, round=since, step=since * H, root=root)
    return made


@given(ROUNDS, ROUNDS, ROUNDS)
def test_it_never_gives_up_more_than_it_gains(since: int, more: int, theirs: int) -> None:
    own = since + more
    worth = theirs - own > max(STALE_ROUNDS, more)
    assert origin(since, alone=True).late(own, theirs, "a") == worth
    assert origin(since).late(own, theirs, "b") == worth


@given(ROUNDS, ROUNDS)
def test_halves_of_one_swarm_are_never_late(own: int, theirs: int) -> None:
    """However slow one of them is."""
    assert not origin().late(own, theirs, "a")
    assert not Origin().late(own, theirs, "")
    alone = origin(alone=True)
    alone.met("a")
    assert not alone.late(own, theirs, "a")


@given(st.lists(st.sampled_from("0123456789abcdef"), min_size=1, max_size=30))
def test_a_smaller_root_that_comes_late_sets_no_halves_apart(told: list[str]) -> None:
    """A slow peer asked for a state again whenever somebody with a new smaller root had met it before the others."""
    slow, roots = origin(10, root=told[0]), set[str]()
    for root in told:
        slow.met(root)
        roots.add(slow.root)
        assert not any(slow.late(10, 10 + STALE_ROUNDS + 1, it) for it in roots)
    assert slow.late(10, 10 + STALE_ROUNDS + 1, "of others")


@given(ROUNDS, ROUNDS, st.booleans(), ROOTS)
def test_one_whose_weights_are_as_good_is_not_late_until_it_takes_others(
    own: int, theirs: int, alone: bool, root: str
) -> None:
    it = origin(alone=alone)
    it.others_are_no_better()
    assert not it.late(own, theirs, root)
    it.note(alone=True, taken=False, round=0, step=0, root="a")
    assert it.late(0, STALE_ROUNDS + 1, root)


@given(st.lists(st.integers(100, 110), max_size=6), st.integers(0, 6), st.booleans())
def test_most_must_say_so(honest: list[int], liars: int, alone: bool) -> None:
    own = origin(50, alone=alone)
    others = [member_record("b", round, root="a") for round in honest]
    false = [member_record("b", 10**6, root="b")] * liars
    assert not own.late_to(105, others)
    assert own.late_to(105, [*others, *false]) == (liars > len(honest))


@given(ROUNDS, ROUNDS, ROOTS)
def test_the_only_other_one_is_believed(own: int, round: int, root: str) -> None:
    began = origin()
    assert began.late_to(own, [member_record("b", round, root=root)]) == began.late(own, round, root)
    assert not began.late_to(own, [])


@given(ROOTS, ROOTS, ROOTS)
def test_who_meets_agrees(one: str, two: str, three: str) -> None:
    first, second = origin(root=one), origin(root=two)
    first.met(two)
    second.met(one)
    assert first.root == second.root
    first.met(three)
    assert first.root == min({one, two, three} - {""}, default="")


@given(ROUNDS, st.integers(STALE_ROUNDS + 1, 1000))
def test_who_has_slept_is_late_until_most_are_not_ahead_of_it(own: int, more: int) -> None:
    """Whomever it meets before: that peer may have slept as long, and its own clock does not know how long."""
    it = origin()
    it.woke(own, own * H)
    it.met("a")
    assert it.late(own, own + more, "a") and it.bounds(own, own * H, H, 10.0) == PositionBounds()
    it.has_caught_up()
    it.met("a")
    assert not it.late(own, own + more, "a") and it.bounds(own, own * H, H, 10.0) != PositionBounds()


def asking(
    own: Origin, round: int, others: list[MemberRecord], divergence: DivergenceTracker, joins_from: int = 0
) -> Any:
    """What :meth:`Presence.replacement` reads of a peer."""
    boundary = SimpleNamespace(progress=SimpleNamespace(phase_seconds=10.0))
    return SimpleNamespace(
        _counters=SimpleNamespace(round=round, boundary_step=round * H),
        others=lambda: others,
        origin=own,
        _context=SimpleNamespace(inner_steps=H, boundary=boundary),
        matchmaking=SimpleNamespace(joins_late=True),
        _joins_from=joins_from,
        _divergence=divergence,
        _node=SimpleNamespace(peer_id="a"),
        _forgive=lambda peers: None,
    )


@pytest.mark.parametrize(("others", "caught_up"), [([], False), ([9, 30, 30], False), ([9, 9, 30], True)])
def test_who_has_slept_looks_until_it_finds_others(others: list[int], *, caught_up: bool) -> None:
    """Their records may be too old by then. Nor has it caught up while it waits to ask them again."""
    own, records = origin(), [member_record(str(number), it, root="a") for number, it in enumerate(others)]
    presence = asking(own, 9, records, DivergenceTracker(), joins_from=10)
    Presence._woke(presence, 0.0)
    assert Presence.replacement(presence) is None
    own.met("a")
    assert own.late(9, 30, "a") is not caught_up


@pytest.mark.parametrize(
    ("known", "declined"),
    [
        ([], {"ahead"}),  # its proposal comes before any record: the newcomer met it, and set it back
        ([5], set()),  # as many are not ahead: it takes no weights
        ([5, 40], {"ahead"}),
        ([40], {"ahead"}),
    ],
)
def test_who_is_ahead_is_declined_if_most_of_those_that_are_known_are(known: list[int], declined: set[str]) -> None:
    records = [SimpleNamespace(peer_id=f"peer {number}", round=it, root="theirs") for number, it in enumerate(known)]
    it: Any = SimpleNamespace(
        _agreement=SimpleNamespace(round=5),
        _origin=origin(root="own", alone=True),
        _context=SimpleNamespace(others=lambda: records),
    )
    ahead: Any = SimpleNamespace(round=40, root="theirs")
    assert Proposals._ahead(it, {"ahead": ahead}) == declined


class Time:
    """A clock that stands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)


def trained_with_others(time: Time, seconds: float) -> Origin:
    began = origin(10)
    time.now += seconds
    return began


def claim(round: int, done: int = 3) -> State:
    return State(step=round * H, round=round, vectors=(), root="b", phase_steps_done=done)


@pytest.mark.parametrize(
    ("said", "believed"),
    [(10**6, 10 + 2 * 30), (71, 10 + 2 * 30), (69, 69), (45, 45), (40, 40), (39, 40), (0, 40)],
)
def test_a_position_is_bounded_by_the_time_since_it_began(
    said: int, believed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many ids as there are honest members could end their run, or begin it again."""
    bounds = trained_with_others(Time(monkeypatch), 300.0).bounds(40, 40 * H, H, 10.0)
    taken = bounds.nearest(claim(said))
    assert (taken.round, taken.step) == (believed, believed * H)
    assert taken.phase_steps_done == (3 if said == believed else 0)


@pytest.mark.parametrize("done", [H + 1, 10**6])
def test_steps_since_the_boundary_are_bounded_too(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added to the step of the boundary, so they ended a run as well."""
    bounds = trained_with_others(Time(monkeypatch), 300.0).bounds(40, 40 * H, H, 10.0)
    taken = bounds.nearest(claim(69, done))
    assert (taken.round, taken.step, taken.phase_steps_done) == (69, 69 * H, 0)


def test_who_meets_a_member_has_a_measure_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    own = Origin()
    own.note(alone=False, taken=False, round=0, step=0, root="a")
    time.now += 10.0
    assert own.bounds(1, H, H, 10.0) == PositionBounds()
    own.met("a")
    assert own.bounds(1, H, H, 10.0) == PositionBounds((1, 2), (H, 2 * H))


def test_taking_weights_often_takes_a_peer_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    own, round = origin(0), 0
    for _ in range(50):
        time.now += 20.0  # two phases
        round = own.bounds(round + 2, (round + 2) * H, H, 10.0).nearest(claim(10**6)).round
        own.note(alone=False, taken=True, round=round, step=round * H, root="b")
    assert round == 2 * 50 * 20 / 10


@pytest.mark.parametrize(("alone", "phase_seconds"), [(True, 10.0), (False, 0.0)])
def test_who_has_met_nobody_believes_its_swarm(alone: bool, phase_seconds: float) -> None:
    assert origin(10, alone=alone).bounds(40, 40 * H, H, phase_seconds) == PositionBounds()


@pytest.mark.parametrize("why", ["late", "divergent", "suspended"])
def test_each_replacement_has_the_bound(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But that of a peer whose machine has slept: the others have trained on."""
    own = trained_with_others(Time(monkeypatch), 300.0)
    others = [member_record(it, 1000, root="a" if why == "divergent" else "b") for it in "bcd"]
    divergence = DivergenceTracker()
    for it in others if why == "divergent" else []:
        divergence.note(it.peer_id, divergent=True, ahead=960, taken=it.taken)
    presence = asking(own, 40, others, divergence)
    if why == "suspended":
        Presence._woke(presence, 0.0)
    needed = Presence.replacement(presence)
    assert isinstance(needed, Replacement) and bool(needed.ids) is (why == "divergent")
    assert needed.bounds == (PositionBounds() if why == "suspended" else PositionBounds((40, 70), (40 * H, 70 * H)))


class Grouped:
    """A member of a group of ``others`` that has merged with them at round 200, ``ago`` inner phases ago; with the
    first of them only while ``apart`` are in the other part of a split, with which it has merged at round 100. It has
    never met the last of them, which are ``unknown``.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        others: list[int],
        *,
        ago: float = 1.0,
        merged: bool = True,
        apart: int = 0,
        unknown: int = 0,
        phases_per_second: float = 0.0,
        tokens_per_step: float = 0.0,
    ):
        time, speed = Time(monkeypatch), phases_per_second * H * tokens_per_step
        own, records = Origin(), [at_round(f"m{number}", round, speed) for number, round in enumerate(others)]
        own.note(alone=False, taken=False, round=0, step=0, root="a")
        known = [it.peer_id for it in records[: len(records) - unknown]]
        met = known[: len(known) - apart]
        if apart:
            own.with_group(99, 100 * H, [*known, "a"])
        progress = SimpleNamespace(phase_seconds=10.0)
        self.given, self.refused = claim(200), list[str]()
        context: Any = SimpleNamespace(
            members=SimpleNamespace(live=lambda since: records),
            node=SimpleNamespace(member=SimpleNamespace(config="c")),
            inner_steps=H,
            boundary=SimpleNamespace(progress=progress),
            tokens_per_step=lambda: tokens_per_step,
        )
        presence: Any = SimpleNamespace(
            origin=own,
            _group=Group(200, (), Assembly("t", (*(Seat(it, it) for it in met), Seat("a", "a")), 1, {})),
            _counters=SimpleNamespace(round=199, boundary_step=199 * H),
            _step=lambda: 200 * H,
            _record=lambda: at_round("a", 200),
            matchmaking=SimpleNamespace(ended=lambda *_: None, gave_no_state=self.refused.append, joins_late=False),
            others=lambda: SwarmContext.others(context),
            _context=context,
        )
        outcome = Outcome.MERGED if merged else Outcome.ALONE
        Presence.ended(presence, Averaged(torch.zeros(1), outcome))
        time.now += ago * progress.phase_seconds
        monkeypatch.setattr("peer.swarm.presence.take_from", lambda *_: self.given)
        self.presence, self.records = presence, records

    def takes(self, given: State) -> tuple[int, int, int]:
        """Round, step and steps since the boundary, as it takes them from one member."""
        self.given = given
        taken = Presence.state_of(self.presence, Seat("m0", "m0"), [])
        assert taken is not None and not self.refused
        return taken.round, taken.step, taken.phase_steps_done


def at_round(peer_id: str, round: int, speed: float = 0.0) -> MemberRecord:
    return member_record(peer_id, round).model_copy(update={"step": round * H, "tokens_per_second": speed})


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (State(0, 200, ()), (200, 200 * H, 0)),  # the weights of all, and step 0
        (State(0, 1, ()), (199, 200 * H, 0)),
        (claim(440), (440, 202 * H, 0)),
        (claim(201), (201, 201 * H, 3)),
        (claim(200, H), (200, 200 * H, H)),
    ],
)
def test_one_member_of_a_group_neither_ends_the_run_of_the_others_nor_begins_it_again(
    said: State, taken: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader or donor that gave the group's weights with another step put all others there."""
    assert Grouped(monkeypatch, [440, 200, 200, 200, 200]).takes(said) == taken


def test_a_group_is_where_its_members_say_when_it_is_faster_without_this_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had waited for this peer. One of three may lie."""
    assert Grouped(monkeypatch, [230, 230, 230, 440]).takes(claim(230)) == (230, 230 * H, 3)
    assert Grouped(monkeypatch, [440, 200]).takes(claim(440))[1] == 202 * H
    assert Grouped(monkeypatch, [200, 200], ago=20.0).takes(claim(230)) == (230, 230 * H, 3)


def test_a_group_has_gone_on_since_its_members_wrote_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does five phases in one of this peer, which was cut off for six. Its records are of six of its phases ago."""
    fast = {"ago": 6.0, "phases_per_second": 0.5, "tokens_per_step": 64.0}
    assert Grouped(monkeypatch, [224, 224], **fast).takes(claim(230)) == (230, 230 * H, 3)
    assert Grouped(monkeypatch, [224, 224, 440, 440], **fast).takes(claim(440))[1] == (224 + 15 + 1) * H  # two lie


def test_a_lie_that_was_believed_makes_no_room_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """This peer's own step is not old: only those of records grow."""
    group = Grouped(monkeypatch, [200, 10**6], phases_per_second=0.1, tokens_per_step=64.0)
    group.presence._step = lambda: 300 * H
    group.presence._record = lambda: at_round("a", 300, 6.4 * H)
    assert group.takes(claim(400))[1] == (300 + 1) * H


def test_a_group_does_not_stand_where_a_member_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Grouped(monkeypatch, [230, 200, 200])
    it.records[1:] = [record.model_copy(update={"state": "paused"}) for record in it.records[1:]]
    assert it.takes(claim(230)) == (230, 230 * H, 3)


def test_a_peer_that_finds_no_record_has_no_measure_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a sleep, of which its clock knows nothing. The state is not further than any can be (donors.py)."""
    it = Grouped(monkeypatch, [])
    assert it.takes(claim(230)) == (230, 230 * H, 3)
    assert it.takes(State(0, 1, ())) == (199, 200 * H, 0)


@pytest.mark.parametrize("others", [[], [200, 200], [230, 200, 200]])
def test_a_member_of_a_group_that_has_slept_does_not_believe_any_position(
    others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgot where it had merged, so its donor could begin the run again, or end it."""
    it = Grouped(monkeypatch, others)
    Presence._woke(it.presence, 0.0)
    assert it.takes(State(0, 1, ())) == (199, 200 * H, 0)
    assert not others or it.takes(claim(440))[1] == 202 * H


def test_who_slept_with_most_of_its_group_takes_the_step_of_who_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock did not count the sleep, so it took the weights of round 440 with the step of 202, for good."""
    it = Grouped(monkeypatch, [200, 440])
    Presence._woke(it.presence, 10_000.0)
    assert it.takes(claim(440)) == (440, 440 * H, 3)


def test_a_peer_that_was_in_no_group_yet_believes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Grouped(monkeypatch, [200, 200], merged=False).takes(claim(30)) == (30, 30 * H, 3)


@pytest.mark.parametrize("own_part", [[], [200], [200, 200]])
def test_after_a_split_a_member_is_where_the_part_of_most_members_is(
    own_part: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its own round and step, which were higher, for ever. The records are of half a phase ago."""
    it = Grouped(monkeypatch, [*own_part, 150, 150, 150], apart=3)
    it.records[-3:] = [record.model_copy(update={"step": record.step + H // 2}) for record in it.records[-3:]]
    assert it.takes(claim(150)) == (150, 150 * H, 3)
    assert it.takes(claim(152)) == (152, 152 * H, 3)
    lie, least = it.takes(State(0, 1, ())), 149 * H + H // 2
    assert lie == (150, least, 0)


@pytest.mark.parametrize(("mine", "theirs"), [(1, 1), (2, 2), (3, 1)])
def test_fewer_than_half_put_nobody_back(mine: int, theirs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were in a merge once and say to be at the beginning; a leader gives the group's weights with this step."""
    it = Grouped(monkeypatch, [200] * mine + [0] * theirs, apart=theirs)
    assert it.takes(State(0, 1, ())) == (199, 200 * H, 0)


@pytest.mark.parametrize("known", [0, 1, 2])
@pytest.mark.parametrize("unknown", [0, 1, 2, 3])
def test_ids_that_were_in_no_merge_put_nobody_back(known: int, unknown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records cost nothing: with three of them, or with one where the group has left, a liar sent all others back
    to the beginning, again and again.
    """
    it = Grouped(monkeypatch, [200, 200] + [0] * unknown, unknown=unknown)
    del it.records[known:2]
    assert it.takes(State(0, 1, ())) == (199, 200 * H, 0)


def test_most_members_put_nobody_behind_the_last_merge_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Grouped(monkeypatch, [0, 0, 0], apart=3).takes(State(0, 1, ())) == (99, 100 * H, 0)


def test_the_only_other_member_of_a_swarm_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Grouped(monkeypatch, [150], apart=1).takes(claim(150)) == (150, 150 * H, 3)


def test_old_records_of_its_group_put_a_member_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of before the last merge: a leader that gave the position of then would stop the step of all others."""
    it = Grouped(monkeypatch, [190, 190, 190])
    assert it.takes(State(190 * H, 190, ())) == (199, 200 * H, 0)


def test_what_a_first_donor_has_said_counts_until_the_group_gives_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that took a false step kept it for ever."""
    it = Grouped(monkeypatch, [200, 200, 200], merged=False)
    it.presence.origin.note(alone=False, taken=True, round=390, step=390 * H, root="a")
    assert it.takes(claim(200)) == (200, 200 * H, 3)
