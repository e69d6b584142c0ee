"""Who began alone and sees others later: whose weights go on?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.latecomer import STALE_ROUNDS, Beginning

ROUNDS = st.integers(0, 1000)


def beginning(since: int, *, alone: bool = True) -> Beginning:
    made = Beginning()
    made.note(alone=alone, round=since)
    return made


@given(ROUNDS, ROUNDS, ROUNDS)
def test_it_never_gives_up_more_than_it_gains(since: int, more: int, theirs: int) -> None:
    own = since + more
    assert beginning(since).late(own, theirs) == (theirs - own > max(STALE_ROUNDS, more))


@given(ROUNDS, ROUNDS)
def test_who_saw_others_when_it_began_is_never_late(own: int, theirs: int) -> None:
    met = beginning(0)
    met.over()
    assert not met.late(own, theirs)
    assert not beginning(0, alone=False).late(own, theirs)
    assert not Beginning().late(own, theirs)
