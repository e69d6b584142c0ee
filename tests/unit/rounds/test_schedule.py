"""The lengths of the inner phases of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import clock
from peer.rounds.progress import LONGEST_STEP, SHORTEST, STEP_SMOOTHING, Progress, phase_steps
from peer.rounds.types import Grouping


def phases(steps: int, inner_steps: int, grouping: Grouping, swap: float = 0) -> list[int]:
    out = []
    while steps:
        out.append(phase_steps(inner_steps, steps, grouping, swap))
        steps -= out[-1]
    return out


def test_the_last_phase_of_pairs_is_cut_into_shorter_and_shorter_ones() -> None:
    assert phases(150, 50, Grouping.PAIR) == [50, 50, 25, 13, 12]
    assert phases(60, 25, Grouping.PAIR) == [25, 25, 5, 5]
    assert phases(120, 50, Grouping.EVERYONE) == [50, 50, 20]
    assert phases(120, 50, Grouping.NOBODY) == [50, 50, 20]


def test_no_phase_is_cut_shorter_than_a_swap_that_runs_during_it() -> None:
    assert phases(150, 50, Grouping.PAIR, swap=12.5) == [50, 50, 25, 13, 12]
    assert phases(150, 50, Grouping.PAIR, swap=13.5) == [50, 50, 25, 25]
    assert phases(150, 50, Grouping.PAIR, swap=37) == phases(150, 50, Grouping.PAIR, swap=370) == [50, 50, 50]


@given(st.integers(1, 5000), st.integers(1, 600), st.sampled_from(Grouping))
def test_every_step_is_made_and_hardly_a_round_more(steps: int, inner_steps: int, grouping: Grouping) -> None:
    out = phases(steps, inner_steps, grouping)
    assert sum(out) == steps
    assert all(0 < length <= inner_steps for length in out)
    assert out == sorted(out, reverse=True)
    assert len(out) <= -(-steps // inner_steps) + 3
    assert all(length * SHORTEST >= inner_steps for length in out[:-1])
    assert phase_steps(inner_steps, 0, grouping) == 0


def test_one_long_step_says_little_of_the_next_ones_and_a_few_of_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now, progress = 1000.0, Progress()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    progress.begin(50, 50)

    def step(seconds: float) -> float:
        nonlocal now
        now += seconds
        progress.tick()
        return progress.step_seconds

    assert step(0.5) == 0.5
    assert step(300.0) == pytest.approx(0.5 * (1 + STEP_SMOOTHING * (LONGEST_STEP - 1)))
    for _ in range(20):
        step(0.5)
    assert progress.step_seconds < 0.6
    assert max(step(50.0) for _ in range(10)) > 0.6 * 50.0
