"""When losses show harm."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.training.boundaries.rollback import HARM, JUMP, harmful, jumped, pooled

LOSSES = st.lists(st.integers(1, 80).map(lambda it: it / 8), min_size=2, max_size=30)


@pytest.mark.parametrize(
    ("losses", "spread", "mean"),
    [
        ([2.0, 2.1, 2.0], 0.0, None),
        ([2.0, 2.0, 2.3], 0.0, 2.3),  # the last one alone
        ([2.0, 2.3], 0.1, None),  # one batch scatters so
        ([2.3, 2.3, 2.3, 2.3], 0.1, 2.3),  # and four do not
        ([2.0, math.nan], 0.1, math.nan),
        ([], 0.0, None),
    ],
)
def test_the_last_losses_show_a_jump(losses: list[float], spread: float, mean: float | None) -> None:
    assert jumped(losses, 2.0, spread) == (mean if mean is None else pytest.approx(mean, nan_ok=True))


@pytest.mark.parametrize(
    ("merged", "without", "harm"),
    [
        ([2.1, 2.1], [2.0, 2.0], True),
        ([2.02, 2.02], [2.0, 2.0], False),  # 1%
        ([2.5, 1.7], [2.0, 2.0], False),  # 5%, which two batches that scatter so do not show
        ([3.5, 2.7], [2.0, 2.0], True),  # a jump needs no further proof
        ([math.nan, 2.0], [2.0, 2.0], True),
        ([2.0, 2.0], [math.nan, 2.0], True),  # nothing says that it is as good
    ],
)
def test_a_merge_is_harmful(merged: list[float], without: list[float], harm: bool) -> None:
    assert harmful(merged, without, HARM) is harm
    assert harmful(merged, without, JUMP) <= harm


@given(LOSSES, LOSSES)
def test_two_reports_pooled_are_one_of_all_their_losses(one: list[float], two: list[float]) -> None:
    reports = [(len(it), fmean(it), stdev(it)) for it in (one, two)]
    assert pooled(reports) == pytest.approx((fmean([*one, *two]), stdev([*one, *two])))


def test_one_loss_has_no_deviation() -> None:
    mean, deviation = pooled([(1, 2.0, math.nan)])
    assert mean == 2.0 and math.isnan(deviation)
