"""Who leads a group of everyone, and how long it waits for whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.process import LoopContext
from peer.rounds.backoff import MEMORY, PeerBackoff, Proven
from peer.rounds.state import Lineage
from peer.rounds.types import Seat
from peer.swarm.context import BoundaryClock, SwarmContext
from peer.swarm.grouping.known_members import (
    COST_FACTOR,
    MEMBER_BACKOFF,
    NEW_PHASES,
    NEW_SLACK,
    UNREACHED_PHASES,
    KnownMembers,
)
from peer.swarm.grouping.matchmaking import GroupMatchmaking
from peer.swarm.grouping.messages import LeaderNotice


def known(backoff: PeerBackoff, phase_seconds: float = 2.0, patience: float = 600.0) -> Any:
    node = SimpleNamespace(peer_id="me", proven=Proven())
    boundary = SimpleNamespace(progress=SimpleNamespace(phase_seconds=phase_seconds))
    members = SimpleNamespace(live=lambda: [])
    context: Any = SimpleNamespace(node=node, members=members, backoff=backoff, boundary=boundary)
    return KnownMembers(context, patience)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time on a clock that stands."""
    time = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time[0])
    return time


def group(*others: str) -> Any:
    """All have taken part in a round with this peer."""
    it = known(PeerBackoff())
    for peer_id in others:
        it.learn(Seat(peer_id, peer_id))
        it._node.proven.add(peer_id)
    it.leadership.ended(min("me", *others), merged=True)
    return it


def leader(it: Any) -> str:
    """Its id."""
    seat = it.leader()
    return "me" if seat is None else str(seat.peer_id)


def test_at_first_the_smallest_id_leads() -> None:
    it = known(PeerBackoff())
    assert leader(it) == "me"
    it.learn(Seat("z", "z"))
    assert leader(it) == "me"
    it.learn(Seat("a", "a"))
    assert leader(it) == "a"


def test_who_has_led_the_last_round_leads_the_next_one() -> None:
    it = group("c", "d")
    it.leadership.ended("d", merged=True)
    assert leader(it) == "d"
    it.learn(Seat("a", "a"))
    it._node.proven.add("a")
    assert leader(it) == "d"
    it.avoid("d")
    assert leader(it) == "a"


def test_who_has_taken_part_in_no_round_leads_after_those_that_have() -> None:
    """A small id is free: each new one made a round fail."""
    it = group("c", "d")
    it.learn(Seat("a", "a"))
    it.leadership.ended("c", merged=False)
    assert leader(it) == "d"
    it.avoid("d")
    assert leader(it) == "me"


def test_of_two_that_lead_the_one_that_has_taken_part_in_a_round_goes_on_or_else_the_smaller_id() -> None:
    new = known(PeerBackoff())
    new.claimed(Seat("z", "z"), established=False)
    assert leader(new) == "me"
    new.claimed(Seat("z", "z"), established=True)
    assert leader(new) == "z"
    old = group("b")
    old.leadership.ended("me", merged=True)
    old.claimed(Seat("a", "a"), established=False)
    old.claimed(Seat("z", "z"), established=True)
    assert leader(old) == "me"
    old.claimed(Seat("a", "a"), established=True)
    assert leader(old) == "a"


def test_who_does_not_lead_believes_no_claim() -> None:
    it = group("b")
    it.claimed(Seat("a", "a"), established=True)
    assert leader(it) == "b"


def test_after_a_claim_that_was_believed_in_vain_none_is_believed_for_a_while(now: list[float]) -> None:
    """Else each new id would cost a round."""
    it = group("z")
    for number, seconds in enumerate((MEMBER_BACKOFF, 2 * MEMBER_BACKOFF)):
        it.leadership.ended("me", merged=True)
        it.claimed(Seat(f"a{number}", "new"), established=True)
        assert leader(it) == f"a{number}"
        it.missed(f"a{number}")  # it has formed no group
        it.leadership.ended("me", merged=True)
        now[0] += seconds - 1
        it.claimed(Seat("a9", "new"), established=True)
        assert leader(it) == "me"
        now[0] += 2


def test_who_stays_without_a_group_believes_others_again() -> None:
    """Seed 4212: two that each did not know the other from a round led for minutes, and refused each other's claims."""
    it = group("z")
    it.leadership.ended("me", merged=True)
    it.claimed(Seat("a", "a"), established=True)
    it.missed("a")
    for expected in ("me", "me", "b"):
        it.claimed(Seat("a", "a"), established=True)
        it.claimed(Seat("b", "b"), established=True)
        assert leader(it) == expected
        it.leadership.ended("", merged=False)


def test_who_has_led_a_round_that_failed_leads_again_after_the_others() -> None:
    it = group("b", "c", "z")
    assert leader(it) == "b"
    for failed, expected in ("b", "c"), ("c", "me"), ("me", "z"), ("z", "b"):
        it.leadership.ended(failed, merged=False)
        assert leader(it) == expected


def test_who_makes_each_of_its_rounds_fail_leads_ever_more_seldom(now: list[float]) -> None:
    """It led again after a round that had succeeded: every second one failed."""
    it = group("b")
    for seconds in (MEMBER_BACKOFF, 2 * MEMBER_BACKOFF, 4 * MEMBER_BACKOFF):
        it.learn(Seat("b", "b"))
        assert leader(it) == "b"
        it.leadership.ended("b", merged=False)
        assert leader(it) == "me"
        now[0] += seconds - 1
        assert leader(it) == "me"
        now[0] += 2


def test_after_a_round_without_a_group_the_smallest_id_leads_again() -> None:
    """Others may not have seen that it failed, as one that has come back: it would lead, and this peer too."""
    it = group("b", "z")
    it.leadership.ended("b", merged=False)
    assert leader(it) == "me"
    it.leadership.ended("", merged=False)
    assert leader(it) == "b"


def test_leaders_that_let_this_peer_in_at_no_boundary_lead_after_the_others() -> None:
    """Once, the group may be full, or this peer too late. Two that take turns are no longer forgiven by turns."""
    it = group("b", "c", "z")
    for declined, expected in ("b", "b"), ("b", "c"), ("c", "b"), ("b", "c"), ("c", "me"):
        it.leadership.ended("", merged=False, declined=declined)
        assert leader(it) == expected
    assert not it.leadership.grouped


def test_who_lets_this_peer_in_at_every_second_boundary_leads_after_the_others(now: list[float]) -> None:
    """Not for ever: this peer may be late twice in a long run."""
    it = group("b", "c")
    for expected, pause in ("b", MEMBER_BACKOFF), ("c", MEMORY * MEMBER_BACKOFF), ("b", 0.0):
        it.leadership.ended("", merged=False, declined="b")
        assert leader(it) == expected
        now[0] += pause
        it.learn(Seat("b", "b"))
        it.learn(Seat("c", "c"))
        it.leadership.ended("b", merged=True)
        assert leader(it) == "b"


def test_who_was_too_late_twice_believes_the_claim_of_its_leader() -> None:
    """Its group goes on. A leader that claims again and lets it into no group is not believed a second time."""
    it = group("b", "z")
    for _ in range(2):
        it.leadership.ended("b", merged=True)
        it.leadership.ended("", merged=False, declined="b")
    assert leader(it) == "me"
    it.claimed(Seat("b", "b"), established=True)
    assert leader(it) == "b"
    it.leadership.ended("", merged=False, declined="b")
    it.claimed(Seat("b", "b"), established=True)
    assert leader(it) == "me"


def test_whom_the_asked_one_names_leads_until_the_round_has_ended() -> None:
    it = group("b", "z")
    it.elected(Seat("z", "z"))
    assert leader(it) == "z"
    it.leadership.ended("z", merged=False)
    assert leader(it) == "b"
    it.elected(Seat("me", "me"))
    assert leader(it) == "me"
    it.elected(Seat("z", "z"))
    it.avoid("z")
    assert leader(it) == "b"


def test_who_has_taken_part_in_no_round_is_waited_for_some_phases_only() -> None:
    it = known(PeerBackoff())
    assert it.patience("new") == it.patience("me") == NEW_PHASES * 2.0 + NEW_SLACK
    it.leadership.ended("me", merged=True)
    assert it.patience("me") == 600.0
    it._node.proven.add("old")
    assert it.patience("old") == 600.0
    assert known(PeerBackoff(), phase_seconds=0.0).patience("new") == 600.0
    assert known(PeerBackoff(), patience=5.0).patience("new") == 5.0


def test_who_does_not_come_again_and_again_is_left_out_for_longer(now: list[float]) -> None:
    backoff = PeerBackoff()
    it = known(backoff)
    for expected in (1, 2, 4, 8):
        it.missed("new")
        now[0] += expected * MEMBER_BACKOFF - 1
        assert backoff.avoided("new") and not backoff.welcome("new")
        now[0] += 2
        assert not backoff.avoided("new")


def test_who_could_not_be_reached_is_asked_again_after_two_phases(now: list[float]) -> None:
    """Seed 5583: after a split each side left the other out for four, and who came back stayed alone as long."""
    backoff = PeerBackoff()
    it = known(backoff, phase_seconds=20.0)
    it.avoid("b")
    now[0] += UNREACHED_PHASES * 20.0 - 1
    assert backoff.avoided("b")
    now[0] += 2
    assert not backoff.avoided("b")


def test_who_makes_others_wait_in_vain_is_left_out_for_some_times_as_long(now: list[float]) -> None:
    """Seed 4174: a leader that formed no group was followed for 130 s, and again after 40 s."""
    backoff = PeerBackoff()
    it = known(backoff)
    it.missed("new", 130.0)
    now[0] += COST_FACTOR * 130.0 - 1
    assert backoff.avoided("new")
    now[0] += 2
    assert not backoff.avoided("new")


def test_who_makes_two_rounds_fail_soon_after_each_other_has_offended() -> None:
    it = group("b")
    it.made_fail("b", offence=False)
    it.made_fail("b", offence=False)  # of the same round
    assert it._backoff.welcome("b")
    it.made_fail("b", offence=False)
    assert not it._backoff.welcome("b")


def test_one_with_which_the_last_round_succeeded_comes_back_by_a_call() -> None:
    backoff = PeerBackoff()
    it = known(backoff)
    it._node.proven.add("old")
    it.missed("old")
    assert backoff.avoided("old") and backoff.welcome("old") and not backoff.avoided("old")
    it.missed("old")
    assert not backoff.welcome("old"), "it has missed two in turn"


def test_who_missed_a_round_is_waited_for_some_phases_only_also_when_it_has_merged_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cost the others 600 s after each round that it merged: three rounds in 900 s, without it 316."""
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    backoff = PeerBackoff()
    it = known(backoff)
    it._node.proven.add("old")
    it.missed("old")
    assert backoff.welcome("old")
    for seconds in (MEMORY * MEMBER_BACKOFF + 1, MEMORY * (600.0 - MEMBER_BACKOFF) - 2):
        now[0] += seconds
        it._node.proven.add("old")
        assert it.patience("old") == NEW_PHASES * 2.0 + NEW_SLACK
        it.missed("old")
        assert not backoff.welcome("old"), "it is an offence"
    it._node.proven.add("old")
    now[0] += MEMORY * MEMBER_BACKOFF + 1
    assert it.patience("old") == 600.0, "it is forgotten"


def test_a_slow_member_that_could_not_be_reached_is_waited_for_as_before() -> None:
    """It may be more than six times as slow as its leader, so it would miss each round."""
    it = group("slow")
    it.avoid("slow")
    assert it.patience("slow") == 600.0


def test_of_two_that_lead_one_whose_last_round_had_no_group_follows() -> None:
    """It had the smaller id, and led nobody for as long as the others distrusted it."""
    it = group("z")
    it.leadership.ended("me", merged=True)
    it.leadership.ended("", merged=False)
    it.claimed(Seat("z", "z"), established=False)
    assert leader(it) == "me"
    it.claimed(Seat("z", "z"), established=True)
    assert leader(it) == "z"


def test_of_two_that_may_not_reach_each_other_one_is_left_out_in_turns() -> None:
    it = group("b", "c")
    backoff = it._backoff
    for out, kept in ("c", "b"), ("b", "c"), ("c", "b"):
        backoff._held.clear()
        for peer_id in ("b", "c"):
            it.made_fail(peer_id, offence=False)
        it.suspected(("b", "c"))
        assert not backoff.welcome(out) and not backoff.avoided(kept)


def test_who_accuses_one_after_the_other_is_left_out_itself() -> None:
    it = group("a", "b", "c", "liar")
    for victim in ("a", "b", "c", "a"):
        it.suspected((victim, "liar"))
    assert it._left_out == {"liar": 4}


def test_of_three_suspects_each_has_its_turn() -> None:
    """Two of them took turns, and an accuser with the smallest id was never left out."""
    it = group("a", "b", "c")
    for _ in range(6):
        it.suspected(("a", "b", "c"))
    assert it._left_out == {"a": 2, "b": 2, "c": 2}


def test_suspects_lead_after_the_others() -> None:
    it = group("b", "c", "d")
    it.leadership.ended("b", ("c", "me"), merged=False)
    assert leader(it) == "d"


def test_who_does_not_reach_a_member_that_lives_lets_another_one_lead_once() -> None:
    it = group("b", "c")
    present = [Seat("b", "b")]
    assert it.successor(present) is None
    it._unreached = True
    assert it.successor([]) is None and it.successor(present) == present[0]
    assert it.successor(present) is None


class ToldMember:
    """Of a group that A leads. It is alive, takes each notice, and does not join: it has made no inner step."""

    def __init__(self) -> None:
        self.notices: list[LeaderNotice] = []
        self.peer_id, self.name, self.addresses = "B", "b", ()
        self.state, self.config = "training", "c"

    async def open_to_member(self, *_: Any) -> Any:
        return SimpleNamespace(send_last=self._notice)

    async def _notice(self, notice: LeaderNotice, timeout: float) -> None:
        self.notices.append(notice)


async def test_a_live_member_that_does_not_join_costs_its_leader_one_round() -> None:
    """Each round was lost as long as another member had made no step: this peer trained, and took no outer step."""
    other = ToldMember()
    node: Any = SimpleNamespace(
        peer_id="A",
        proven=Proven(),
        addresses=(),
        member=SimpleNamespace(name="a", config="c"),
        open_to_member=other.open_to_member,
        background=asyncio.ensure_future,
    )
    members: Any = SimpleNamespace(live=lambda: [other])
    training = LoopContext()
    counters: Any = SimpleNamespace(round=0, boundary_step=0, lineage=Lineage("x"))
    context = SwarmContext(node, members, BoundaryClock(training.progress), training, counters, 10)
    matchmaking = GroupMatchmaking(context, 600.0, equal=True)
    groups = [await matchmaking._gather() for _ in range(3)]
    assert [group.lost for group in groups] == ["b did not come", "", ""]
    assert other.notices and not any(group.links for group in groups)
