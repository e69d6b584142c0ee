"""How long the members of a group wait for one another: each deadline leaves room for those within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.exchange.group.deadlines import RoundDeadlines
from peer.p2p.deadline import THREAD_GRACE
from peer.rounds.transfer_rule import swap_limit

STALLS = st.floats(0.1, 1000.0)


def deadlines(stall: float, phase_seconds: float) -> RoundDeadlines:
    return RoundDeadlines(stall, swap_limit(stall, 4.0, phase_seconds))


def test_what_a_silent_member_costs_depends_on_the_work_and_not_on_the_limit() -> None:
    hours = deadlines(10.0, 3600.0)
    assert hours.until_said(7.0, failed=False) == 17.0
    assert hours.until_said(7.0, failed=True) == 10.0
    assert (hours.limit, hours.latest) == (14_400.0, 28_810.0)


@given(stall=STALLS, phase_seconds=st.floats(0.1, 10_000.0), share=st.floats(0.0, 1.0))
def test_each_deadline_leaves_room_for_those_within_it(stall: float, phase_seconds: float, share: float) -> None:
    it = deadlines(stall, phase_seconds)
    took = share * it.limit
    assert took + it.until_said(took, failed=False) <= it.latest * (1 + 1e-9)
    assert took + it.until_said(took, failed=True) <= took + it.until_said(took, failed=False)
    assert it.until_said(took, failed=False, by_leader=True) > it.until_said(took, failed=False), "for the verdict"
    assert it.accusations <= it.until_said(took, failed=True) / 2, "a failed member hears the verdict in time"
    assert it.longest - it.latest == pytest.approx(stall + THREAD_GRACE), "for the verdict"
