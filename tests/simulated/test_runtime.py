"""What a simulated process may do when it is killed."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator

from tests.simulated.loop import Process
from tests.simulated.runtime import Runtime


def test_the_garbage_collector_runs_nothing_of_a_killed_process() -> None:
    """It closed the generators of such a process, in tasks that failed: they were still at an await."""
    runtime, noticed = Runtime(random.Random(0)), []
    runtime.loop.complain = lambda context: noticed.append(str(context.get("exception")))

    async def parts() -> AsyncIterator[int]:
        try:
            await runtime.loop.create_future()
            yield 1
        finally:
            noticed.append("it went on")

    async def read() -> None:
        async for _ in parts():
            pass

    async def world() -> None:
        process = Process("peer")
        runtime.start(process, lambda: runtime.loop.create_task(read()))
        await asyncio.sleep(1.0)
        assert process.tasks
        runtime.kill(process)
        del process
        gc.collect()
        await asyncio.sleep(1.0)
        assert not noticed

    with runtime.installed():
        runtime.loop.run_until_complete(world())
