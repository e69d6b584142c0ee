"""Calls into the network thread end in time, and a frozen process has not waited."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from peer import clock
from peer.errors import RunError
from peer.p2p.event_loop import CANCEL_TIMEOUT, RESTART_SECONDS, WIND_DOWN_TIMEOUT, LoopThread
from tests.simulated.loop import Process
from tests.simulated.runtime import Runtime
from tests.unit.virtual import took, within


@pytest.mark.parametrize("timeout", [0.2, 2.3, 60.0])
def test_a_call_that_hangs_ends_in_time(thread: LoopThread, timeout: float) -> None:
    began = clock.monotonic()
    with pytest.raises(RunError, match="gave no answer within"):
        thread.call(asyncio.sleep(3600), timeout)
    assert clock.monotonic() - began == took(timeout)


def test_a_call_into_a_real_thread_ends_too(real_thread: LoopThread) -> None:
    with pytest.raises(RunError, match="gave no answer within"):
        real_thread.call(asyncio.sleep(3600), 0.2)


def test_what_is_computed_beside_the_training_takes_one_core_and_the_training_as_many_as_before(
    real_thread: LoopThread,
) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert real_thread.call(clock.in_thread(torch.get_num_threads), 60) == 1
        with ThreadPoolExecutor(1) as later:
            assert torch.get_num_threads() == later.submit(torch.get_num_threads).result(60) == 3
    finally:
        torch.set_num_threads(usual)


def test_what_the_work_raises_is_no_hang(thread: LoopThread) -> None:
    async def late() -> None:
        async with asyncio.timeout(0.1):
            await asyncio.sleep(60)

    began = clock.monotonic()
    with pytest.raises(TimeoutError):
        thread.call(late(), 10)
    assert clock.monotonic() - began == took(0.1)


def test_what_an_interrupt_ends_does_not_go_on(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that had caught a Ctrl+C and restored its state was still at its boundary, and looked for a partner."""
    ended = list[BaseException]()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as error:
            ended.append(error)

    def interrupted(*_: object) -> None:
        clock.sleep(1.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clock, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.call(work(), 10)
    clock.sleep(1.0)
    assert ended


async def clings() -> None:
    """A task that cannot be cancelled."""
    for _ in range(10):
        try:
            await asyncio.sleep(1e4)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize(
    ("goodbye", "seconds"),
    [
        (0.0, 2 * CANCEL_TIMEOUT),  # the background, and then all that is left
        (60.0, WIND_DOWN_TIMEOUT),
    ],
)
def test_a_close_waits_for_nobody_for_ever(virtual: Runtime, goodbye: float, seconds: float) -> None:
    thread = LoopThread()
    thread.spawn(clings())
    clock.sleep(1.0)
    began = clock.monotonic()
    thread.close(asyncio.sleep(goodbye))
    assert clock.monotonic() - began == took(seconds)


def test_a_close_ends_a_background_task_and_only_one_that_failed_is_spoken_of(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise ValueError("no such peer")

    ended: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(1e4)
        finally:
            ended.append(True)

    thread.spawn(fails())
    thread.spawn(waits())
    clock.sleep(1.0)
    thread.close()
    assert ended and [it.getMessage() for it in caplog.records if it.levelname == "ERROR"] == [
        "a background task ended: ValueError('no such peer')"
    ]


def test_what_a_node_needs_while_it_runs_begins_again_after_an_error(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended for good: a peer asked nobody to meet it any more, or was announced no longer."""
    begun = list[float]()

    async def fails_once() -> None:
        begun.append(clock.monotonic())
        if len(begun) == 1:
            raise ValueError("no such peer")

    thread.keep(fails_once)
    clock.sleep(3 * RESTART_SECONDS)
    assert len(begun) == 2 and begun[1] - begun[0] == took(RESTART_SECONDS)
    assert [it.getMessage() for it in caplog.records if it.levelname == "ERROR"] == [
        "a background task failed, and begins again in 10 s: ValueError('no such peer')"
    ]


@pytest.mark.parametrize("frozen", [3.0, 8.0, 3600.0])
def test_a_process_that_was_frozen_for_longer_than_its_deadline_goes_on(virtual: Runtime, frozen: float) -> None:
    process = Process("freezable")

    async def work() -> float:
        began = clock.monotonic()
        for _ in range(10):
            await asyncio.sleep(0.1)
        return clock.monotonic() - began

    with within(process):  # the freeze costs two of the six seconds, the work one
        done = clock.worker("main").submit(lambda: LoopThread().call(work(), 6.0))
    clock.sleep(0.55)  # its sixth sleep is cut short by the freeze
    process.freeze()
    clock.sleep(frozen)
    assert not done.done()
    process.thaw(virtual.loop)
    assert clock.result(done, 10.0) == took(0.95 + frozen)
