"""The clock, and what waits in threads: the one place where most packages take them.

In exchange, outer, p2p, rounds, swarm, telemetry and training a coroutine waits by the clock of its event loop, and
all else calls these functions. The tests replace them in this module: then those packages run in virtual time, in one
thread (tests/simulated). The other packages, and p2p/daemon.py, may take ``time`` and ``threading`` themselves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


monotonic = time.monotonic  # for durations
unix = time.time  # this machine's clock, which may be wrong: for what other machines read
sleep = time.sleep  # of a thread that is not an event loop's
wait = concurrent.futures.wait  # for futures, in such a thread
event = threading.Event  # for one thread that waits for another one
condition = threading.Condition  # for several threads that wait; not in virtual time

SLICE = 1.0  # seconds of waiting between two readings of the clock
FREEZE = 1.0  # seconds by which a wait may be longer on a busy machine; a longer one was a freeze


def slices(seconds: float, length: float = SLICE) -> Iterator[float]:
    """Waiting times, one after the other, of ``seconds`` in total. The time of a freeze does not count."""
    left = seconds
    while left > 1e-6:  # less is what rounding leaves
        began, patience = monotonic(), min(left, length)
        yield patience
        left -= min(monotonic() - began, patience + FREEZE)


def result(future: concurrent.futures.Future[Result], seconds: float) -> Result:
    """Wait for ``future`` in a thread that is not an event loop's; raises ``TimeoutError`` after ``seconds``."""
    for patience in slices(seconds):
        wait([future], patience)
        if future.done():
            return future.result()
    raise TimeoutError


class _Worker(concurrent.futures.Executor):
    """One daemon thread. The end of the process waits for those of a ``ThreadPoolExecutor``, whatever they do."""

    def __init__(self, name: str) -> None:
        self._works = queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        if self._ended:
            raise RuntimeError("the worker is shut down")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._works.put((future, partial(work, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ended = True
        with contextlib.suppress(queue.Empty):
            while cancel_futures and (given := self._works.get_nowait()) is not None:
                given[0].cancel()
        self._works.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            future, work = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - for who asks for the result
                    future.set_exception(error)
            del given, future, work  # what they hold is large, and the next one may be long in coming


def worker(name: str) -> concurrent.futures.Executor:
    """A thread that runs one function after the other. The end of the process does not wait for it."""
    return _Worker(name)


def begin_thread(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of its own, which the end of the process does not wait for; not in virtual time."""
    threading.Thread(target=work, name=name, daemon=True).start()


async def in_thread(work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """The result of ``work``, which computes for a while, from another thread.

    A thread cannot be cancelled: who cancels this waits until ``work`` has ended, and nothing writes to a buffer then.
    """
    call = partial(contextvars.copy_context().run, work, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(None, call)  # asyncio.to_thread needs a task for each call
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])


def start_loop(name: str, prepare: Callable[[], None]) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """An event loop that runs in a daemon thread. ``prepare``: what each thread of :func:`in_thread` does first.

    asyncio's own, whatever the program uses: a stream that is lost raises other errors in uvloop.
    """
    loop = asyncio.SelectorEventLoop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(thread_name_prefix=name, initializer=prepare))
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    return loop, thread
