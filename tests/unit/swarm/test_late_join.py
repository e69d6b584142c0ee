"""A peer that began apart from its swarm finds it later: which weights go on?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.healing import STALE_ROUNDS, Origin
from peer.swarm.pairing.proposals import Proposals
from tests.unit.parts import member_record

ROUNDS = st.integers(0, 1000)
ROOTS = st.sampled_from(["", "a", "b", "c"])


def origin(since: int = 0, *, root: str = "a", alone: bool = False) -> Origin:
    made = Origin()
    made.note(alone=alone, round=since, root=root)
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


@given(ROUNDS, ROUNDS, st.booleans(), ROOTS)
def test_one_whose_weights_are_as_good_is_not_late_until_it_takes_others(
    own: int, theirs: int, alone: bool, root: str
) -> None:
    it = origin(alone=alone)
    it.is_as_good()
    assert not it.late(own, theirs, root)
    it.note(alone=True, round=0, root="a")
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
