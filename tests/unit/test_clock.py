"""How long one waits is how long the process ran meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import clock
from peer.clock import FREEZE, SLICE, slices


def quarters(most: int) -> st.SearchStrategy[float]:
    """Of seconds: a clock that is set by hand must not stand still by rounding."""
    return st.integers(1, 4 * most).map(lambda number: number / 4)


@given(quarters(20), st.lists(quarters(2000), max_size=5))
def test_only_a_freeze_makes_it_longer(seconds: float, freezes: list[float]) -> None:
    """Each freeze falls into one slice."""
    with pytest.MonkeyPatch.context() as patch:
        now, waited = 0.0, 0.0
        patch.setattr(clock, "monotonic", lambda: now)
        for number, slice in enumerate(slices(seconds)):
            assert 0 < slice <= SLICE
            waited += slice
            now += slice + (freezes[number] if number < len(freezes) else 0.0)
    lost = sum(min(it, FREEZE) for it in freezes)  # what a busy machine may take as well
    assert seconds - lost <= waited <= seconds
