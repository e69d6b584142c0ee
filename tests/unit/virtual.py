"""Virtual time for unit tests: a wait costs nothing, and how long it was does not depend on the machine.

With the fixture ``virtual``, or within :func:`virtual_time`, a test is the main thread of a process of
tests/simulated/runtime.py: while it waits, the event loop runs. A test that is a coroutine runs on that loop.
:func:`line` makes streams that fit the loop.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import pytest

from peer import clock
from peer.p2p.stream import Stream
from tests.simulated.loop import PROCESS, Process, VirtualLoop
from tests.simulated.p2p.network import Connection, Network, Writer
from tests.simulated.runtime import Runtime

T = TypeVar("T")
End = Callable[[], Coroutine[Any, Any, tuple[asyncio.StreamReader, Any]]]

LATENCY, RATE = 0.001, 1e9  # seconds one way, and bytes a second: next to the deadlines they are nothing
NOTHING = 0.02  # seconds: latency, transfer and the work of other threads in a small exchange
UPTIME = 3600.0  # seconds on the clock when a test begins: a machine's is not at 0 either
LONGEST = 1e5  # seconds that a test may wait


@contextmanager
def virtual_time() -> Iterator[Runtime]:
    """The product runs in virtual time, with the same random choices every time."""
    runtime, process, complaints = Runtime(random.Random(0)), Process("test"), []

    def complain(context: dict[str, Any]) -> None:
        if "handle" in context:  # what fails outside of every task; a task's failure reaches who waits for it
            complaints.append(context)

    runtime.loop.complain = complain
    with runtime.installed():
        try:
            with within(process):
                clock.sleep(UPTIME)
                yield runtime
        finally:
            _end_all(runtime.loop)
            runtime.kill(process)
            runtime.loop.close()
    assert not complaints, complaints


def _end_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for task in tasks:
        _wait_for(asyncio.run_coroutine_threadsafe(_ended(task), loop))


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])


def _wait_for(future: Any) -> Any:
    clock.wait([future], LONGEST)
    return future.result(0)


@contextmanager
def within(process: Process) -> Iterator[None]:
    """What is begun in the context belongs to ``process``, which a test can freeze."""
    token = PROCESS.set(process)
    try:
        yield
    finally:
        PROCESS.reset(token)


def run(work: Coroutine[Any, Any, T], runtime: Runtime | None = None) -> T:
    """As ``asyncio.run``, in the virtual time of ``runtime`` or a new one."""
    with nullcontext(runtime) if runtime else virtual_time() as it:
        result: T = _wait_for(asyncio.run_coroutine_threadsafe(work, it.loop))
        return result


def line(loop: asyncio.AbstractEventLoop, latency: float = LATENCY, rate: float = RATE) -> tuple[End, End]:
    """The ends of a new stream, of who calls and who is called, each to be opened by its side.

    In memory where the time of ``loop`` is virtual; else a unix socket pair, whose transports are asyncio's own.
    """
    if not isinstance(loop, VirtualLoop):
        left, right = socket.socketpair()
        return partial(asyncio.open_connection, sock=left), partial(asyncio.open_connection, sock=right)
    network = Network(loop, random.Random(0))
    caller, called = network.add(latency / 2, rate, rate), network.add(latency / 2, rate, rate)
    caller.process = called.process = PROCESS.get()
    there, back = Connection(network, caller, called).stream(caller, called)

    async def one() -> tuple[asyncio.StreamReader, Any]:
        return back.reader, Writer(there)

    async def other() -> tuple[asyncio.StreamReader, Any]:
        return there.reader, Writer(back)

    return one, other


async def stream_pair(latency: float = LATENCY, rate: float = RATE) -> tuple[Stream, Stream]:
    """Initiator and responder on a :func:`line` of the running loop."""
    left, right = line(asyncio.get_running_loop(), latency, rate)
    return Stream(*await left(), remote="B", initiator=True), Stream(*await right(), remote="A", initiator=False)


def took(seconds: float, more: float = NOTHING) -> Any:
    """Equal to a measured duration of ``seconds``, and not a moment less: ``more`` are those of transfers and work."""
    return pytest.approx(seconds + more / 2, abs=more / 2 + 1e-6)
