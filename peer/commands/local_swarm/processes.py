"""The wait for the child processes of a local swarm: until the bootstrap node listens, and until all have stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from peer.errors import RunError
from peer.process import Child, Stop

READY_LINE = re.compile(r" ready: .*\bhttp=(\S+)")  # a bootstrap node prints it when it listens
READY_LOOK = 0.05  # seconds between two looks for it
STOP_SECONDS = 900.0  # to finish a step and a swap, and to save: a large model's checkpoint takes minutes


def stop_all(children: Sequence[Child]) -> None:
    """Ask all to stop, then wait for all, with one deadline."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        child.wait(deadline)


def monitor_of(bootstrap: Child, timeout: float, stop: Stop) -> str:
    """Wait for the bootstrap node; HOST:PORT of its page, empty after a stop. Raises :class:`RunError` when it ends or
    is late.
    """
    deadline = time.monotonic() + timeout
    while not (ready := READY_LINE.search(bootstrap.output())):
        if stop.requested:
            return ""
        if bootstrap.exit_code() is not None:
            raise RunError(f"the bootstrap node ended: {bootstrap.last_line()}")
        if time.monotonic() > deadline:
            raise RunError(f"the bootstrap node did not start within {timeout:.0f} s; see {bootstrap.console}")
        time.sleep(READY_LOOK)
    return ready[1]
