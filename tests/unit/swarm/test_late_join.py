"""A peer that began apart from its swarm finds it later: which weights go on?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.healing import STALE_ROUNDS, Origin
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


@given(st.lists(st.integers(100, 110), max_size=6), st.booleans())
def test_a_single_liar_is_not_believed_against_two(honest: list[int], alone: bool) -> None:
    own = origin(50, alone=alone)
    others = [member_record("b", round, root="a") for round in honest]
    liar = member_record("b", 10**6, root="b")
    for judged in (False, True):
        assert not own.late_to(105, others, judged=judged)
        assert own.late_to(105, [*others, liar], judged=judged) == (judged or len(honest) < 2)


@given(ROUNDS, st.lists(st.tuples(ROUNDS, ROOTS), max_size=2))
def test_one_or_two_others_are_believed(own: int, others: list[tuple[int, str]]) -> None:
    began = origin()
    records = [member_record("b", round, root=root) for round, root in others]
    assert began.late_to(own, records, judged=False) == any(began.late(own, *it) for it in others)


@given(ROOTS, ROOTS, ROOTS)
def test_who_meets_agrees(one: str, two: str, three: str) -> None:
    first, second = origin(root=one), origin(root=two)
    first.met(two)
    second.met(one)
    assert first.root == second.root
    first.met(three)
    assert first.root == min({one, two, three} - {""}, default="")
