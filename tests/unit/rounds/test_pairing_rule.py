"""Who may meet whom, and when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from peer.rounds.pairing_rule import LAST_CALL, MET_LAST, NEVER, askable, in_order, last_swaps, longest_ago, near

SECONDS = st.floats(0, 1e4)
MET = st.dictionaries(st.integers(0, 30), st.integers(NEVER, 5), min_size=1)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0, 1))
def test_two_peers_agree_on_whether_they_are_near(a: float, b: float, p: float, q: float, window: float) -> None:
    assert near(a, b, p, q, window) == near(b, a, q, p, window)
    assert near(a, a, p, q, window)


@given(st.integers(1, 50), st.floats(0, 1), st.floats(0.3, 0.8))
def test_who_was_met_longest_ago_is_asked_first_and_all_are_at_last(count: int, left: float, opens: float) -> None:
    candidates = list(range(count))
    due = list(askable(candidates, left, opens))
    assert due == candidates[: len(due)]
    assert (due == []) == (left > max(opens, LAST_CALL))
    assert len(askable(candidates, left / 2, opens)) >= len(due)
    assert left > LAST_CALL or due[: count - 1] == candidates[: count - 1]
    assert left > MET_LAST or due == candidates
    if count > 1 and left > max(MET_LAST, opens / count):
        assert count - 1 not in due


@given(MET)
def test_all_are_asked_in_the_order_in_which_they_were_met(met: dict[int, int]) -> None:
    order = in_order(met, met.__getitem__)
    first = longest_ago(met, met.__getitem__)
    assert sorted(order) == sorted(met)
    assert set(order[: len(first)]) == set(first)
    assert [met[it] for it in order] == sorted(met.values())


def test_equals_are_in_random_order() -> None:
    assert len(Counter(in_order(range(3), lambda it: NEVER)[0] for _ in range(300))) == 3


def test_the_last_swaps_are_log2_of_the_members_with_a_round_that_has_merged_but_one_at_least() -> None:
    assert [last_swaps(it, merged=False) for it in (1, 2, 3, 4, 8, 9)] == [0, 1, 2, 2, 3, 4]
    assert [last_swaps(it, merged=True) for it in (1, 2, 3, 4, 8, 9)] == [0, 1, 1, 1, 2, 3]
