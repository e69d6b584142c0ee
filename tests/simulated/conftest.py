"""Shared by the simulations."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.simulated.world import collect


@pytest.fixture(autouse=True)
def _its_worlds_are_collected() -> Iterator[None]:
    """After the test, which holds the last one."""
    gc.freeze()  # the collection looks at what the test makes only
    yield
    if not gc.isenabled():
        collect()
