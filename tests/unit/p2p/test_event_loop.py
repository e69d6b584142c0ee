"""Calls into the network thread end in time, and a frozen process has not waited."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from peer.errors import RunError
from peer.p2p.event_loop import LoopThread

FREEZABLE = """
import asyncio
from peer.p2p.event_loop import LoopThread

async def work():
    print("begun", flush=True)
    for _ in range(10):
        await asyncio.sleep(0.1)
    return "done"

print(LoopThread().call(work(), 4.0), flush=True)
"""


def test_a_call_that_hangs_ends_in_time() -> None:
    thread = LoopThread()
    try:
        for timeout in (0.2, 2.3):
            began = time.monotonic()
            with pytest.raises(RunError, match="gave no answer within"):
                thread.call(asyncio.sleep(60), timeout)
            assert timeout <= time.monotonic() - began < timeout + 2
    finally:
        thread.close()


def test_what_the_work_raises_is_no_hang() -> None:
    async def late() -> None:
        async with asyncio.timeout(0.1):
            await asyncio.sleep(60)

    thread = LoopThread()
    try:
        with pytest.raises(TimeoutError):
            thread.call(late(), 10)
    finally:
        thread.close()


def test_a_process_that_was_frozen_for_longer_than_its_deadline_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", FREEZABLE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "done\n"
        finally:
            process.kill()
