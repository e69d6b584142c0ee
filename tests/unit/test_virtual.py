"""A test in virtual time hears of what fails outside of it."""

from __future__ import annotations

import pytest

from peer import clock
from tests.unit.virtual import virtual_time


def test_a_callback_that_fails_fails_the_test() -> None:
    """Nobody awaits it, so its exception reached only a handler that was asked for nothing."""
    with pytest.raises(AssertionError, match="ZeroDivisionError"), virtual_time() as runtime:
        runtime.loop.call_soon(lambda: 1 / 0)
        clock.sleep(1.0)
