"""Two parts of a swarm whose weights have nothing in common: which of them gives way, and that it ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Outcome
from peer.swarm.directory.records import MemberRecord
from peer.swarm.healing import MIN_DIVERGENT_SWAPS, REMEMBERED_PARTNERS, DivergenceTracker
from peer.swarm.matchmaking import Matchmaking
from peer.swarm.presence import Presence
from tests.unit.parts import member_record

PATIENCE = 60  # meetings of each


@dataclass
class Member:
    """``line``: members of one line have something in common. A hostile one has nothing in common with any other."""

    peer_id: str
    line: str
    round: int
    hostile: bool = False
    taken: int = 0
    divergence: DivergenceTracker = field(default_factory=DivergenceTracker)

    @property
    def claims(self) -> int:
        return 10**6 if self.hostile else self.round

    def record(self) -> MemberRecord:
        return member_record(self.peer_id, self.claims, taken=self.taken)

    def meet(self, other: Member, *, chosen: bool = False) -> None:
        ahead, divergent = other.claims - self.claims, self.line != other.line
        self.divergence.note(other.peer_id, divergent=divergent, chosen=chosen, ahead=ahead, taken=other.taken)

    def cross(self, members: Sequence[Member], records: Sequence[MemberRecord], chance: random.Random) -> None:
        """A boundary, a while after ``records`` were made."""
        self.round += 1
        others = [record for record in records if record.peer_id != self.peer_id]
        donors = self.divergence.larger_part(self.peer_id, self.round, others)
        if donors:
            chosen = chance.choice(donors)
            donor = next(member for member in members if member.peer_id == chosen)
            self.line, self.round = donor.line, donor.round
            self.taken += 1
            self.divergence.clear()


def parts(*sizes: int, rounds: Sequence[int] = (), hostile: int = 0) -> list[Member]:
    rounds = rounds or [100] * len(sizes)
    members = [
        Member(f"{line}{number:03}", f"line {line}", rounds[line])
        for line, size in enumerate(sizes)
        for number in range(size)
    ]
    return members + [Member(f"z{number}", f"liar {number}", 0, hostile=True) for number in range(hostile)]


def train(members: Sequence[Member], seed: int, meetings: int = PATIENCE) -> None:
    """Random pairs, until each has met ``meetings`` others or the honest ones have one line."""
    chance = random.Random(seed)
    for _ in range(meetings):
        shuffled = chance.sample(members, len(members))
        for one, two in zip(shuffled[::2], shuffled[1::2], strict=False):
            one.meet(two, chosen=True)
            two.meet(one)
        records = [member.record() for member in members]
        for member in shuffled:
            if not member.hostile:
                member.cross(members, records, chance)


def lines(members: Sequence[Member]) -> set[str]:
    return {member.line for member in members if not member.hostile}


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10))
def test_of_two_exactly_one_gives_way_after_two_swaps(one: int, two: int, seed: int) -> None:
    """The one that is less far."""
    members = parts(1, 1, rounds=(one, two))
    for swaps in range(1, MIN_DIVERGENT_SWAPS + 1):
        for member, other in (members, members[::-1]):
            member.meet(other)
        records = [member.record() for member in members]
        for member in members if seed % 2 else members[::-1]:
            member.cross(members, records, random.Random(seed))
        assert (len(lines(members)) == 1) == (swaps == MIN_DIVERGENT_SWAPS)
    assert lines(members) == {"line 1" if two >= one else "line 0"}
    assert sum(member.taken for member in members) == 1


@given(st.integers(1, 7), st.integers(1, 2), st.sampled_from([0, 10**5]), st.integers(0, 2**32))
def test_the_smaller_part_gives_way_however_far_it_is(small: int, more: int, ahead: int, seed: int) -> None:
    members = parts(small, small + more, rounds=(100 + ahead, 100))
    train(members, seed)
    assert lines(members) == {"line 1"}


@given(st.integers(1, 8), st.integers(0, 2**32))
def test_equal_parts_become_one(half: int, seed: int) -> None:
    members = parts(half, half, rounds=(100, 160))
    train(members, seed)
    assert lines(members) == {"line 1"}


@pytest.mark.parametrize("sizes", [(40, 40), (20, 60), (20, 20, 20)])
def test_a_large_swarm_becomes_one_by_what_each_has_seen(sizes: tuple[int, ...]) -> None:
    members = parts(*sizes)
    train(members, 0, meetings=150)
    assert len(lines(members)) == 1


@given(st.integers(2, 9), st.integers(0, 2**32))
def test_who_has_nothing_in_common_with_anybody_moves_nobody_of_more_than_two(honest: int, seed: int) -> None:
    """However far it says it is."""
    members = parts(honest, hostile=1)
    train(members, seed)
    assert all(member.taken == 0 for member in members)


@pytest.mark.parametrize("hostile", [8, 12])
@pytest.mark.parametrize("honest", [9, 12, 40])
def test_a_few_hostile_ids_that_propose_before_all_others_move_nobody(honest: int, hostile: int) -> None:
    """They were most of the last partners of each member, and said to be further."""
    members, chance = parts(honest, hostile=hostile), random.Random(0)
    victims, others = members[: min(honest, hostile)], members[hostile:honest]
    for _ in range(PATIENCE):
        records = [member.record() for member in members]
        for victim, liar in zip(victims, chance.sample(members[honest:], len(victims)), strict=True):
            victim.meet(liar)
        shuffled = chance.sample(others, len(others))
        for one, two in zip(shuffled[::2], shuffled[1::2], strict=False):
            one.meet(two, chosen=True)
            two.meet(one)
        for member in members[:honest]:
            member.cross(members, records, chance)
    assert all(member.taken == 0 for member in members)


def test_in_a_large_swarm_the_round_that_a_partner_claims_decides_nothing() -> None:
    near, far = [f"a{number}" for number in range(20)], [f"z{number}" for number in range(9)]
    divergence, records = DivergenceTracker(), [member_record(it) for it in (*near, *far)]
    for it in (*near, *far):
        divergence.note(it, divergent=it in far, ahead=2**53)
    for it in (*near, *far[:8]):
        divergence.note(it, divergent=it in far, chosen=True, ahead=2**53)
    assert not divergence.larger_part("b", 10, records)  # eight, and as many with this peer
    divergence.note(far[8], divergent=True, chosen=True)
    assert divergence.larger_part("b", 10, records) == far


def test_new_hostile_ids_that_are_asked_first_move_nobody() -> None:
    """A peer asks those first that it has never met: each of them cost it a round."""
    others = [member.record() for member in parts(20)[1:]]
    divergence, hostile = DivergenceTracker(), list[str]()
    for it in others * 2:
        divergence.note(it.peer_id, divergent=False, chosen=True)
    for number in range(100):
        hostile = [*hostile[-15:], f"z{number}"]
        divergence.note(hostile[-1], divergent=True, chosen=True, ahead=2**53)
        assert not divergence.larger_part("0000", 100, [*others, *map(member_record, hostile)])


def test_a_merge_and_a_change_of_sides_end_what_was_known() -> None:
    for ended in ("merge", "taken"):
        divergence = DivergenceTracker()
        for _ in range(MIN_DIVERGENT_SWAPS):
            divergence.note("b", divergent=True, taken=0)
        assert divergence.larger_part("a", 10, [member_record("b")])
        if ended == "merge":
            divergence.note("b", divergent=False, taken=0)
        now = [member_record("b", taken=int(ended == "taken"))]
        assert not divergence.larger_part("a", 10, now)
        assert divergence.replaced(now) == (["b"] if ended == "taken" else [])
        assert divergence.replaced(now) == []


@pytest.mark.parametrize("chosen", [True, False])
def test_a_swap_is_noted_with_who_has_proposed_it(chosen: bool) -> None:
    noted: list[tuple[str, dict[str, Any]]] = []
    presence: Any = SimpleNamespace(
        avoid=lambda *_, **__: None,
        matchmaking=Matchmaking(),
        _group=Group(0),
        _members=SimpleNamespace(taken_by=lambda _: 2),
        _divergence=SimpleNamespace(note=lambda peer_id, **said: noted.append((peer_id, said))),
    )
    far = Averaged(torch.empty(0), Outcome.POISONED, partner_id="b", chosen=chosen, strange=True, ahead=3)
    Presence.ended(presence, far)
    assert noted == [("b", {"divergent": True, "chosen": chosen, "ahead": 3, "taken": 2})]


def test_what_is_remembered_is_bounded() -> None:
    divergence = DivergenceTracker()
    for number in range(1000):
        divergence.note(str(number), divergent=True, taken=0)
    assert len(divergence._partners) == REMEMBERED_PARTNERS
