"""An asyncio loop in a thread of its own. Every call into it has a deadline; close() cancels the tasks that are left.

hivemind runs its DHT in a forked process instead. A thread needs no pipe (that one breaks above 16 KiB), leaves no
orphan after a kill and does not fork before CUDA starts. node.py runs the peer-to-peer network on this loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

from peer import clock
from peer.errors import RunError
from peer.logs import get_logger

log = get_logger("network")
LoopResult = TypeVar("LoopResult")

CANCEL_TIMEOUT = 3.0  # seconds for cancelled tasks to end
WIND_DOWN_TIMEOUT = 10.0  # seconds for the last coroutine
RESTART_SECONDS = 10.0  # after an error, until the work begins again
_SETTING_THREADS = Lock()


class NoAnswer(RunError):
    """The network hangs. The model is as good as before."""


class LoopThread:
    """Starts at once and runs until :meth:`close`."""

    def __init__(self) -> None:
        self.loop, self._thread = clock.start_loop("network", _compute_alone)
        self.loop.set_exception_handler(_say_quietly)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, LoopResult], timeout: float) -> LoopResult:
        """Run ``work`` and wait at most ``timeout`` seconds for it; raises :class:`NoAnswer`. From any other thread.

        ``work`` does not outlive the call, also when a Ctrl+C ends that.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return clock.result(future, timeout)
        except BaseException as error:
            if future.cancel() and isinstance(error, TimeoutError):
                raise NoAnswer(f"the network thread gave no answer within {timeout:.0f} s") from None
            raise  # what ``work`` itself raised, or an interrupt

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until it ends or the thread does. From any other thread."""
        self.loop.call_soon_threadsafe(self.background, work)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """As :meth:`spawn`, for what is needed as long as the thread runs: after an error it begins again."""
        self.spawn(_begun_again(work))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As :meth:`spawn`, from the loop itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def close(self, goodbye: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel the background, run ``goodbye``, cancel all that is left, end the thread. Twice is fine."""
        if not self.alive:
            if goodbye is not None:
                goodbye.close()
            return
        with contextlib.suppress(RunError, concurrent.futures.CancelledError):
            self.call(self._wind_down(goodbye), WIND_DOWN_TIMEOUT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CANCEL_TIMEOUT)
        if not self.alive:
            self.loop.close()

    async def _wind_down(self, goodbye: Coroutine[Any, Any, None] | None) -> None:
        await _cancel(self._tasks)
        if goodbye is not None:
            await goodbye
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task ended: %r", task.exception())


async def _begun_again(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 - none is expected, and the next time it may be another
            log.error("a background task failed, and begins again in %.0f s: %r", RESTART_SECONDS, error)
        await asyncio.sleep(RESTART_SECONDS)


def _compute_alone() -> None:
    """From now on torch uses no other thread for what this one computes: parts are small, so several threads would
    mostly wait for each other, and they would take cores from the training.
    """
    with _SETTING_THREADS:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = Thread(target=torch.set_num_threads, args=(usual,))  # the last call counts for new threads
        restore.start()
        restore.join()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    pending = list(tasks)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=CANCEL_TIMEOUT)


def _say_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """hivemind's own tasks end with exceptions when a connection breaks; asyncio would print a traceback for each."""
    log.debug("%s %r", context.get("message"), context.get("exception"))
