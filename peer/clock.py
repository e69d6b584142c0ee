"""The clock, and what waits in threads: the one place where the product takes them.

A coroutine waits by the clock of its event loop; all else calls these functions. The tests replace them in this module:
then the same code runs in virtual time, in one thread (tests/simulated).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


monotonic = time.monotonic  # for durations
unix = time.time  # this machine's clock, which may be wrong: for what other machines read
sleep = time.sleep  # of a thread that is not an event loop's
event = threading.Event  # for one thread that waits for another one


class RunningThread(Protocol):
    """The thread in which an event loop runs."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float) -> None: ...


def result(future: concurrent.futures.Future[Result], seconds: float) -> Result:
    """Wait for ``future`` in a thread that is not an event loop's; raises ``TimeoutError`` after ``seconds``."""
    return future.result(seconds)


def worker(name: str) -> concurrent.futures.Executor:
    """A thread that runs one function after the other."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)


async def in_thread(work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """The result of ``work``, which blocks or computes for long, from another thread."""
    return await asyncio.to_thread(work, *args, **kwargs)


def start_loop(name: str) -> tuple[asyncio.AbstractEventLoop, RunningThread]:
    """An event loop that runs in a daemon thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    return loop, thread
