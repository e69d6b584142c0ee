"""What the event loop and the connections' threads tell each other about one direction of a transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peer import clock

CONDITION_SECONDS = 1.0  # between two looks of a thread that waits


class Handover:
    """Of ``payloads``, one after the other; their parts are numbered on. ``stall``: seconds without a byte after which
    a connection is lost. Its state belongs to ``changed``, which threads hold while they read or change it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, payloads: int = 1) -> None:
        self.changed = clock.condition()
        self.complete = False
        self.stall = 10.0
        self._payloads = payloads  # that have not begun to come, or are not made
        self._loop, self._told = loop, asyncio.Event()
        self._awaited = False  # the event loop waits for a change
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End it, from any thread: all that wait raise ``error``. The first one counts."""
        with self.changed:
            self._error = self._error or error
            self.tell()

    def tell(self) -> None:
        """The state has changed; ``changed`` is held."""
        self.changed.notify_all()
        self.tell_loop()

    def tell_loop(self) -> None:
        """As :meth:`tell`, for a change that no thread waits for: to wake all costs more than most changes."""
        if self._awaited and not self._loop.is_closed():
            self._awaited = False  # to wake it costs more than the change
            self._loop.call_soon_threadsafe(self._told.set)

    def require_open(self) -> None:
        """Raises the error with which it has ended; ``changed`` is held."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """In a thread, until the state has changed; ``changed`` is held."""
        self.changed.wait(CONDITION_SECONDS)
        self.require_open()

    async def until(self, condition: Callable[[], bool]) -> None:
        """On the event loop, until ``condition``. Raises the error with which it has ended before.

        The deadline is offer.py's: ``_Dialler.keep`` and ``_watch`` end the transfer when its connections are lost.
        """
        while True:
            self._told.clear()
            with self.changed:
                if condition():
                    return
                self.require_open()
                self._awaited = True
            await self._told.wait()
