"""Peers of a new run wait for one another before they train (``peer.start_with``)."""

from __future__ import annotations

from collections.abc import Callable

from peer import clock
from peer.errors import RunError
from peer.logs import fields, get_logger
from peer.swarm.context import SwarmContext

log = get_logger("presence")

START_PERIOD = 0.2  # seconds between two looks at the members that are known


class StartBarrier:
    """``waits``, ``ready``: what this peer's record says of it. ``announce`` writes that record."""

    def __init__(self, context: SwarmContext, announce: Callable[[], None]) -> None:
        self._context, self._announce = context, announce
        self.waits = self.ready = False

    def await_others(self, count: int, seconds: float) -> int | None:
        """Return when ``count`` members begin together, when one trains already, or after ``seconds``.

        A member is ready when it has seen so many, and begins when so many are ready: nobody trains before all have
        seen one another. Returns the latest round of those that begin together, ``None`` when this peer comes late or
        begins without all.
        """
        log.info("waiting for others: %s", fields(of=count, seconds=seconds))
        latest = self._wait(count, clock.monotonic() + seconds)
        self.waits = False
        self._announce()  # others wait for it
        return latest

    def _wait(self, count: int, until: float) -> int | None:
        began, latest = clock.unix(), 0
        while not self._context.stopping:
            if self._context.node.failure:
                raise RunError(self._context.node.failure)
            fresh = self._context.others(since=began)  # an older record may be that of a killed peer
            waiting = [record for record in self._context.others() if record.state == "waiting"]
            begun = any(record.state == "training" for record in fresh)
            if self.ready and (begun or sum(record.ready for record in waiting) + 1 >= count):
                return latest
            if begun:
                return None
            if not self.ready and len(waiting) + 1 >= count:
                self.ready, latest = True, max((record.round for record in waiting), default=0)
                self._announce()
            if clock.monotonic() > until:
                log.warning("begins without all: %s", fields(members=len(fresh) + 1, of=count))
                return None
            clock.sleep(START_PERIOD)
        return None
