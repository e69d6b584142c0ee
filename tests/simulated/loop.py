"""Virtual time: an event loop whose clock jumps to the next event, and processes that it can freeze and kill."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

BUSY = 100_000  # callbacks at one moment
MANY = 100  # cancelled timers or ended tasks that are kept


class Stuck(Exception):
    """Nothing will ever happen again although somebody waits."""


class Process:
    """One peer's process. ``skew``: seconds by which its machine's clock is ahead."""

    def __init__(self, name: str, skew: float = 0.0) -> None:
        self.name, self.skew = name, skew
        self.dead = self.frozen = False
        self.threads: dict[greenlet.greenlet, None] = {}
        self.thawed = -math.inf  # virtual time at which its last freeze ended; infinite during one
        self.fuse = 0  # events until ``explode`` is called
        self.explode: Callable[[], None] = lambda: None
        self._held: list[_Call] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._many = MANY

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended."""
        self._tasks = [it for it in self._tasks if not it.done()]
        return list(self._tasks)

    def own(self, task: asyncio.Task[Any]) -> None:
        """It has begun this task."""
        self._tasks.append(task)
        if len(self._tasks) > self._many:
            self._many = 2 * len(self.tasks) + MANY

    def burn(self) -> None:
        """One of its events has happened."""
        self.fuse -= 1
        if not self.fuse:
            self.explode()

    def freeze(self) -> None:
        """Nothing of it runs until :meth:`thaw`."""
        self.frozen, self.thawed = True, math.inf

    def thaw(self, loop: VirtualLoop) -> None:
        self.frozen, self.thawed, held = False, loop.time(), self._held
        self._held = []
        for call in held:
            loop.again(call)

    def hold(self, call: _Call) -> None:
        """Its turn came while it was frozen. A dead process has no further turn."""
        if not self.dead:
            self._held.append(call)


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _NoSelector(selectors.BaseSelector):
    """There is no file to wait for."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def unregister(self, fileobj: Any) -> Any: ...

    def get_map(self) -> Any:
        return {}


class _Call:
    """A callback that the loop will run: what :class:`asyncio.TimerHandle` is to the product."""

    __slots__ = ("_cancelled", "_loop", "_process", "_run", "_what", "_when")

    def __init__(
        self, loop: VirtualLoop, when: float, what: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        context = contextvars.copy_context() if context is None else context
        self._loop, self._when, self._what, self._run = loop, when, what, context.run
        self._process, self._cancelled = context.get(PROCESS), False

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled = True

    def run(self) -> None:
        """Unless it is cancelled or its process cannot."""
        process = self._process
        if self._cancelled:
            return
        if process is not None and (process.dead or process.frozen):
            process.hold(self)
            return
        try:
            self._run(*self._what)
        except BaseException as error:  # noqa: BLE001 - as asyncio's loop does it
            context = {"message": f"Exception in {self._what[0]}", "exception": error, "handle": self}
            self._loop.call_exception_handler(context)
        if process is not None and process.fuse:
            process.burn()


class VirtualLoop(asyncio.SelectorEventLoop):
    """``steps``: callbacks that were scheduled. Those of one moment run in the order in which they were."""

    def __init__(self) -> None:
        super().__init__(_NoSelector())
        self.now = 0.0
        self.steps = self._busy_from = 0
        self._busy_at = -1.0
        self.complain: Callable[[dict[str, Any]], None] = lambda context: None
        self.hub = greenlet.getcurrent()
        self._soon: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._many = MANY
        self.set_task_factory(_owned_task)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        call = _Call(self, when, (callback, *args), context)
        if len(self._timers) > self._many:
            self._timers = [it for it in self._timers if not it[2].cancelled()]
            heapq.heapify(self._timers)
            self._many = 2 * len(self._timers) + MANY
        self.steps += 1
        heapq.heappush(self._timers, (when, self.steps, call))
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self._check_closed()  # type: ignore[attr-defined]
        call = _Call(self, self.now, (callback, *args), context)
        self.again(call)
        return call

    call_soon_threadsafe = call_soon

    def again(self, call: _Call) -> None:
        """Run ``call`` at this moment."""
        self.steps += 1
        if self.steps > self._busy_from + BUSY:
            if self.now == self._busy_at:
                raise Stuck("somebody is busy for ever")
            self._busy_at, self._busy_from = self.now, self.steps
        self._soon.append(call)

    def _run_once(self) -> None:
        """All callbacks of this moment or, when there are none, of the next one that has some."""
        soon, timers = self._soon, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not soon and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Stuck
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):
            soon.popleft().run()

    def set_exception_handler(self, handler: Any) -> None:
        """``complain`` gets what the product would only log."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.complain(context)

    def _make_self_pipe(self) -> None: ...

    def _close_self_pipe(self) -> None: ...


def _owned_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    context = options.get("context")
    process = (contextvars.copy_context() if context is None else context).get(PROCESS)
    if process is not None:
        process.own(task)
    return task
