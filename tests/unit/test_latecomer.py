"""Who began away from its swarm and sees it later: whose weights go on?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.latecomer import STALE_ROUNDS, Beginning

ROUNDS = st.integers(0, 1000)
ROOTS = st.sampled_from(["", "a", "b", "c"])


def beginning(since: int = 0, *, root: str = "a", alone: bool = False) -> Beginning:
    made = Beginning()
    made.note(alone=alone, round=since, root=root)
    return made


@given(ROUNDS, ROUNDS, ROUNDS)
def test_it_never_gives_up_more_than_it_gains(since: int, more: int, theirs: int) -> None:
    own = since + more
    worth = theirs - own > max(STALE_ROUNDS, more)
    assert beginning(since, alone=True).late(own, theirs, "a") == worth
    assert beginning(since).late(own, theirs, "b") == worth


@given(ROUNDS, ROUNDS)
def test_halves_of_one_swarm_are_never_late(own: int, theirs: int) -> None:
    """However slow one of them is."""
    assert not beginning().late(own, theirs, "a")
    assert not Beginning().late(own, theirs, "")
    alone = beginning(alone=True)
    alone.met("a")
    assert not alone.late(own, theirs, "a")


@given(ROOTS, ROOTS, ROOTS)
def test_who_meets_agrees(one: str, two: str, three: str) -> None:
    first, second = beginning(root=one), beginning(root=two)
    first.met(two)
    second.met(one)
    assert first.root == second.root
    first.met(three)
    assert first.root == min({one, two, three} - {""}, default="")
