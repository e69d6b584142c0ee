"""Of whom does a peer take the state, when it joins or comes back?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.swarm import join
from peer.swarm.donor import State
from peer.swarm.join import CHOOSY, NEAR, donors_of, take_state
from peer.swarm.meeting import Party
from peer.swarm.records import MemberRecord
from peer.swarm.thread import LoopThread

ROUNDS = st.integers(0, 40)


def record(number: int, round: int) -> MemberRecord:
    return MemberRecord(
        peer_id=f"Qm{number}",
        name=f"peer-{number}",
        addresses=["/ip4/10.0.0.7/tcp/31337"],
        config="c0ffee",
        state="training",
        step=25 * round,
        round=round,
        boundary_in=1.0,
        tokens_per_second=100.0,
        metrics="0.0.0.0:9464",
    )


def rounds(members: list[int], above: int, reached: int) -> list[int]:
    return [it.round for it in donors_of([record(*it) for it in enumerate(members)], above, reached)]


@given(st.lists(ROUNDS, max_size=8), ROUNDS, ROUNDS)
def test_there_is_a_donor_when_anybody_is_further_and_each_is_near_the_furthest(
    members: list[int], above: int, reached: int
) -> None:
    found = rounds(members, above, reached)
    furthest = sorted([0, 0, *members])[-2 if len(members) > 2 else -1]
    assert bool(found) == any(it > above for it in members)
    for it in found:
        assert it > above
        assert it > furthest - NEAR
        assert it >= min(reached, furthest)  # nothing is done again that others have


def test_newcomers_spread_and_who_comes_back_takes_what_it_had() -> None:
    assert rounds([12, 16, 17, 20], above=0, reached=0) == [16, 17, 20]
    assert rounds([16, 17, 10**9], above=0, reached=0) == [16, 17, 10**9]  # a liar is one of many
    assert rounds([12, 16, 17, 20], above=10, reached=17) == [17, 20]
    assert rounds([12, 16, 17, 20], above=10, reached=30) == [17, 20]
    assert rounds([12, 20], above=10, reached=30) == [20]
    assert rounds([12, 16, 17, 20], above=20, reached=30) == []


class Listed:
    """The directory of twenty members that stand where no peer was further."""

    def refresh_all(self) -> list[MemberRecord]:
        return [record(number, 5) for number in range(20)]


def test_few_are_asked_for_rounds_that_perhaps_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copies its state to answer."""
    asked: list[int] = []

    async def take(*who: Any) -> State:
        asked.append(who[-1])
        if who[-1] > 5:
            raise join._Behind
        return State(125, 5, [])

    monkeypatch.setattr(join, "_take", take)
    thread = LoopThread()
    try:
        found = take_state(thread, Listed(), Party("a", "r", "c0ffee", "{}"), "layout", [], 5, above=0, reached=9)  # type: ignore[arg-type]
    finally:
        thread.close()
    assert found is not None and found.round == 5
    assert asked == [9] * CHOOSY + [0]
