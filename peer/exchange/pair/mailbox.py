"""What the training thread and the network thread hand over in an overlapped swap.

The training thread *opens* a part: it takes the outer step with a group of one and puts its own contribution here. The
network thread sends it, receives the partner's and puts the correction here. :class:`OpeningPace` says how many parts
are open. So a part is late by a step or two, or by twice the latency of the line, and not by the transfer time of the
whole tensor, which would cost loss (peer/exchange/README.md). An open part takes twice its own memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from peer import clock
from peer.exchange.codec import BLOCK
from peer.rounds.contribution import PART, Averaged, most_open

LEAST_PARTS = 64  # where the model has that many blocks
LEAST_OPEN = 2  # parts open at once
# times the usual number of parts: a step in which more land was long (an evaluation), and says nothing of how long a
# part is on its way
LONG_STEP = 3.0


@dataclass(frozen=True)
class OpenPart:
    """A part when it was opened, and its change by the inner steps before."""

    own: Tensor
    change: Tensor


def overlapped_parts(numel: int) -> list[tuple[int, int]]:
    """Borders of the parts: 1 MiB each, less for a small model. The same for all peers of a run."""
    blocks = -(-numel // BLOCK)
    size = BLOCK * min(PART // BLOCK, -(-blocks // LEAST_PARTS))
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


class OpeningPace:
    """How many parts of one swap are opened at each inner step: twice as many are open as land while one is on its way,
    and never more than ``most``. So the line is full, and a part waits for about as long as it travels.

    ``landing``: parts that land while one is on its way; ``usual``: the same of the last swap, or 0.
    """

    def __init__(self, most: int, usual: float = 0.0) -> None:
        self.most, self.landing = most, usual
        self._steps: list[tuple[int, int]] = []  # parts that were opened and received before each inner step
        self._way = 0  # inner steps that a part is on its way, at least: with more open parts it waits; 0 if unknown

    def free(self, opened: int, received: int, sent: int, *, idle: bool = False) -> int:
        """How many more parts may be open, when so many were opened, received and sent: one is open until both.

        Asked once an inner step, which it counts. ``idle``: no inner step is taken, so only ``most`` bounds them.
        """
        free = self.most - (opened - min(received, sent))
        if not idle:
            landed = self._landed(opened, received)
            free = min(free, max(LEAST_OPEN, int(2 * landed) + 1) - (opened - received))
        return max(0, free)

    def _landed(self, opened: int, received: int) -> float:
        self._steps.append((opened, received))
        last = len(self._steps) - 1
        landed = received - self._steps[-2][1] if last else 0
        long = landed > LONG_STEP * received / (last + 1) + LEAST_OPEN
        if landed and not long:
            before = last - 1  # the last inner step before which the newest part that has landed was not open
            while before and self._steps[before][0] >= received:
                before -= 1
            self._way = min(self._way or last, last - before)
        if not self._way:
            return self.landing
        self.landing = received * self._way / len(self._steps)
        return received - self._steps[max(0, last - self._way)][1]


class SwapMailbox:
    """One swap. ``learn``: gets the start and the change of each part before the part is sent or received.
    ``usual``: as in :class:`OpeningPace`.
    """

    def __init__(
        self,
        numel: int,
        loop: asyncio.AbstractEventLoop,
        learn: Callable[[int, Tensor], None] | None = None,
        usual: float = 0.0,
    ) -> None:
        self.parts = overlapped_parts(numel)
        self.opening_pace = OpeningPace(most_open(len(self.parts)), usual)
        self.received_parts = self._sent_parts = 0
        self._loop, self._wake, self._learn = loop, asyncio.Event(), learn
        self._waking = False  # the network thread will look at the open parts
        self.cancelled = False  # this peer has given up the swap
        self._changed = clock.event()
        self._close: Callable[[], None] | None = None
        self._opened: dict[int, OpenPart] = {}
        self._count = 0  # parts opened
        self._corrections: deque[tuple[int, Tensor]] = deque()
        self._held: list[tuple[int, Tensor]] = []  # received, and not to be used yet
        self._result: Averaged | BaseException | None = None

    # -- training thread

    def parts_to_open(self, *, idle: bool = False) -> range:
        """Parts to open now, asked once an inner step. ``idle``: as many as may be open, because no inner step is
        taken. When the swap has ended the rest is opened too, some parts in each step: all at once take seconds.
        """
        if self._result is not None:
            return self.parts_left()[: self.opening_pace.most]
        if self._close is None:
            return range(0)
        free = self.opening_pace.free(self._count, self.received_parts, self._sent_parts, idle=idle)
        return self.parts_left()[:free]

    def parts_left(self) -> range:
        """Parts that are not open yet."""
        return range(self._count, len(self.parts))

    def put(self, index: int, part: OpenPart) -> None:
        """Part ``index`` is open. After the end of the swap nobody needs it."""
        if self._learn is not None:
            self._learn(self.parts[index][0], part.change)
        if self._result is None:
            self._opened[index] = part
        self._count = index + 1
        if not self._waking:  # one call for all parts that are opened together
            self._waking = True
            self._loop.call_soon_threadsafe(self._look)

    def take_corrections(self) -> list[tuple[int, Tensor]]:
        """Corrections since the last call: index of the part, fp32 on the host."""
        return [self._corrections.popleft() for _ in range(len(self._corrections))]

    def result(self) -> Averaged | None:
        """The result of the swap, once it has ended. Raises the error of the network thread."""
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def cancel(self) -> None:
        """Give up the swap; its result comes soon."""
        self.cancelled = True
        if self._close is not None:
            self._loop.call_soon_threadsafe(self._close)

    def wait(self, seconds: float) -> None:
        """Until a correction has come, parts can be opened or the swap has ended; at most ``seconds``."""
        self._changed.clear()
        if not self._corrections and self._result is None:
            self._changed.wait(seconds)

    @property
    def used_parts(self) -> int:
        """Received parts whose corrections were given out."""
        return self.received_parts - len(self._held)

    # -- network thread and its helpers

    def start(self, close: Callable[[], None]) -> None:
        """The partner is there: parts may be opened from now on. ``close`` ends the stream to it."""
        self._close = close
        self._changed.set()

    async def opened(self, index: int, patience: float) -> OpenPart:
        """Part ``index``, once this peer has opened it; ``TimeoutError`` after ``patience`` seconds."""
        if index >= self._count:
            async with asyncio.timeout(patience):
                while index >= self._count:
                    self._wake.clear()
                    await self._wake.wait()
        return self._opened[index]

    async def opened_from(self, index: int, patience: float) -> list[OpenPart]:
        """As :meth:`opened`, with the parts after ``index`` that are open too, up to ``PART`` elements together."""
        first = await self.opened(index, patience)
        more = min(self._count - index, PART // first.own.numel())
        return [first, *(self._opened[it] for it in range(index + 1, index + more))]

    def _look(self) -> None:
        self._waking = False
        self._wake.set()

    def add_correction(self, index: int, correction: Tensor, *, usable: bool = True) -> None:
        """The partner's part ``index`` is verified. It is used with the next one that is ``usable``."""
        self._held.append((index, correction))
        if usable:
            self._corrections.extend(self._held)
            self._held.clear()
        self.received_parts += 1
        if self.received_parts <= self._sent_parts:
            del self._opened[self.received_parts - 1]
        self._changed.set()

    def count_sent(self) -> None:
        """One more part has been sent, in order like the partner's."""
        self._sent_parts += 1
        if self._sent_parts <= self.received_parts:
            del self._opened[self._sent_parts - 1]

    def finish(self, result: Averaged | BaseException) -> None:
        """The swap has ended with a result or an error."""
        self._result = result
        self._changed.set()
