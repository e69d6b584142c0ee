"""What :mod:`peer.clock` is in virtual time (loop.py).

The product's coroutines run on the loop. Its threads (a peer's main thread, the helper of an overlapped swap) are
greenlets: one that waits gives control to the loop. So everything runs in one thread, and a seed decides the order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import greenlet

from peer import clock
from tests.simulated.loop import PROCESS, Process, VirtualLoop

Result = TypeVar("Result")
EPOCH = 1.7e9  # unix seconds at virtual time 0
IN_THREAD = (1e-4, 3e-3)  # seconds of a computation in another thread
WAKE = 1e-5  # seconds until a thread runs again


class Crashed(greenlet.GreenletExit):
    """Raised in the threads of a killed process wherever they wait."""


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

    def start_loop(self, name: str, prepare: Callable[[], None]) -> tuple[asyncio.AbstractEventLoop, _NetworkThread]:
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
