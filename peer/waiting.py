"""Deadlines that stand still while the process does: a suspended machine, ``docker pause`` and SIGSTOP stop all its
threads, so whoever waits for another one of them must not take that for a hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

SLICE = 1.0  # seconds of waiting between two looks at the clock
LATE = 1.0  # seconds by which one may be longer on a busy machine; more was a freeze


def slices(seconds: float, length: float = SLICE) -> Iterator[float]:
    """How long to wait, again and again, until it has been for ``seconds`` in all."""
    left = seconds
    while left > 0:
        began, patience = time.monotonic(), min(left, length)
        yield patience
        left -= min(time.monotonic() - began, patience + LATE)
