"""Virtual time: an event loop whose clock jumps to the next event, and processes that it can freeze and kill.

The product's coroutines run on the loop. Its threads (a peer's main thread, the helper of an overlapped swap) are
greenlets: one that waits gives control to the loop. So everything runs in one thread, and a seed decides the order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import heapq
import math
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import greenlet

from peer import clock

Result = TypeVar("Result")
EPOCH = 1.7e9  # unix seconds at virtual time 0
IN_THREAD = (1e-4, 3e-3)  # seconds of a computation in another thread
BUSY = 100_000  # callbacks at one moment
MANY = 100  # cancelled timers or ended tasks that are kept
WAKE = 1e-5  # seconds until a thread runs again


class Crashed(greenlet.GreenletExit):
    """Raised in the threads of a killed process wherever they wait."""


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
        """Unless its process cannot."""
        process = self._process
        if process is not None and (process.dead or process.frozen):
            process.hold(self)
            return
        try:
            self._run(*self._what)
        except BaseException as error:  # noqa: BLE001 - as asyncio's loop does it
            self._loop.call_exception_handler({"message": f"Exception in {self._what[0]}", "exception": error})
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
        soon = self._soon
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not soon and not self._stopping:  # type: ignore[attr-defined]
            if not self._timers:
                raise Stuck
            self.now = max(self.now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self.now:
            soon.append(heapq.heappop(self._timers)[2])
        for _ in range(len(soon)):
            call = soon.popleft()
            if not call.cancelled():
                call.run()

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


class Runtime:
    """What :mod:`peer.clock` is in a simulation. ``chance``: decides all that the machine would."""

    def __init__(self, chance: random.Random) -> None:
        self.loop, self._chance = VirtualLoop(), chance
        # all that have run, with their tasks: those of a killed one must not be garbage, whose ``finally`` clauses and
        # generators the collector would run in the middle of somebody else's turn
        self._processes: set[Process] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context the product runs in virtual time."""
        names = ("monotonic", "unix", "sleep", "wait", "event", "worker", "in_thread", "start_loop")
        real = {name: getattr(clock, name) for name in names}
        entropy, state = random._urandom, random.getstate()  # type: ignore[attr-defined]
        random._urandom = self._chance.randbytes  # type: ignore[attr-defined]
        random.seed(self._chance.random())
        try:
            for name in names:
                setattr(clock, name, getattr(self, name))
            yield
        finally:
            self._processes.clear()
            random._urandom = entropy  # type: ignore[attr-defined]
            random.setstate(state)
            for name, function in real.items():
                setattr(clock, name, function)

    def start(self, process: Process, work: Callable[..., object], *args: object) -> None:
        """Run ``work`` as a thread of ``process``."""

        def body() -> None:
            try:
                work(*args)
            finally:
                process.threads.pop(thread, None)

        self._processes.add(process)
        thread = greenlet.greenlet(body, parent=self.loop.hub)
        context = contextvars.Context()
        context.run(PROCESS.set, process)
        thread.gr_context = context.copy()
        process.threads[thread] = None
        self.loop.call_soon(thread.switch, context=context)

    def kill(self, process: Process) -> None:
        """As SIGKILL: nothing of it runs any more. The ``finally`` clauses of its threads do, and reach nobody."""
        process.dead = True
        for task in process.tasks:
            task._log_destroy_pending = task._log_traceback = False  # type: ignore[attr-defined]
        for thread in list(process.threads):
            if thread is not greenlet.getcurrent():
                thread.parent = greenlet.getcurrent()
                thread.throw(Crashed())

    # -- what peer.clock offers

    def monotonic(self) -> float:
        return self.loop.time()

    def unix(self) -> float:
        process = PROCESS.get()
        return EPOCH + self.loop.time() + (process.skew if process is not None else 0.0)

    def sleep(self, seconds: float) -> None:
        self.suspend(lambda wake: None, seconds)

    def wait(self, futures: Sequence[concurrent.futures.Future[Any]], seconds: float) -> None:
        (future,) = futures
        if not future.done():
            self.suspend(lambda wake: future.add_done_callback(lambda _: wake()), seconds)

    def event(self) -> threading.Event:
        return _Event(self)

    def worker(self, name: str) -> concurrent.futures.Executor:
        return _Worker(self)

    async def in_thread(self, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """``work`` runs some time after the call; as in a thread, a cancelled caller does not prevent it."""
        done: asyncio.Future[Result] = self.loop.create_future()

        def run() -> None:
            try:
                value = work(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(value)

        self.loop.call_later(self._chance.uniform(*IN_THREAD), run)
        return await done

    def start_loop(self, name: str) -> tuple[asyncio.AbstractEventLoop, clock.RunningThread]:
        return self.loop, _NetworkThread()

    # -- greenlets

    def suspend(self, register: Callable[[Callable[[], None]], None], seconds: float) -> None:
        """Suspend this thread until the function that ``register`` gets is called, at most ``seconds``."""
        me, process = greenlet.getcurrent(), PROCESS.get()
        if me is self.loop.hub:
            self._drive(register, seconds)
            return
        if process is not None and process.dead:
            raise Crashed
        context, woken = contextvars.copy_context(), False

        def wake() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self.loop.call_later(WAKE, me.switch, context=context)

        timer = self.loop.call_later(seconds, wake)
        register(wake)
        self.loop.hub.switch()
        timer.cancel()

    def _drive(self, register: Callable[[Callable[[], None]], None], seconds: float) -> None:
        """As :meth:`suspend`, for a test outside the loop: it runs the loop while it waits."""
        assert not self.loop.is_running(), "the event loop must not wait"
        woken = False

        def wake() -> None:
            nonlocal woken
            woken = True
            self.loop.stop()

        timer = self.loop.call_later(seconds, wake)
        register(wake)
        while not woken:  # who closes a LoopThread stops the loop too
            self.loop.run_forever()
        timer.cancel()


class _Event(threading.Event):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime, self._wake = runtime, lambda: None

    def set(self) -> None:
        super().set()
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._runtime.suspend(lambda wake: setattr(self, "_wake", wake), 1e9 if timeout is None else timeout)
        return self.is_set()


class _Worker(concurrent.futures.Executor):
    """One thread for each piece of work; the product gives it one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        process = PROCESS.get()
        assert process is not None
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                value = work(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - who waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(value)

        self._runtime.start(process, run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class _NetworkThread:
    """The loop is everybody's; a peer that closes its network stops it for itself only."""

    def is_alive(self) -> bool:
        process = PROCESS.get()
        return process is None or not process.dead

    def join(self, timeout: float) -> None: ...
