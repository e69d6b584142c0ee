"""The swap's share of a step while parts are under way: how much an overlapped swap costs the training.

The partner is another process, over loopback. The device is waited for before and after the work between two steps, so
all that this work delays counts. A second swap finds the device with a queue of other work before each look, and must
leave it that queue: a look that waits for the device costs a peer what it has queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from peer.config.schema import Config
from peer.outer.noloco import PartOpening
from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import Stream
from peer.rounds.contribution import Averaged
from peer.rounds.types import Group, Link, Outcome
from tests.gpu.site import CONFIGS, ROOT, Finding, Site, fast
from tests.gpu.swapping import Sharer, amend_parts, open_parts

H, PLAIN_STEPS = 4, 8
MOST_STEPS = 2000  # of a swap
START = 60.0  # seconds for the partner's process
# Looks without a queue precede each one with it. Where one of them takes more than this share of the time that the
# device needs for the queue, the next may end after the queue though it waits for nothing.
QUEUED_EVERY, ENOUGH = 5, 0.8
UNSEEN = "no look was so much shorter than the device's queue that it tells whether looks wait for the device"


def check(site: Site) -> Iterator[Finding]:
    for codec in ("none", "int4"):
        yield _measured(site, codec)


def _config(site: Site, codec: str) -> Config:
    overrides = (f"run.exchange.codec={codec}", "run.exchange.overlap=true", f"run.inner_steps={H}")
    if not site.accelerator:
        return site.config(*overrides, "run.inner.warmup_steps=0")
    preset = CONFIGS / "models" / "llama-125m.yaml", CONFIGS / "methods" / "noloco.yaml"
    return site.config(*overrides, "run.batch_size=16", "run.inner.warmup_steps=0", files=preset)


def _measured(site: Site, codec: str) -> Finding:
    config, network = _config(site, codec), LoopThread()
    with contextlib.closing(network):
        peer = Sharer(site, config, "peer", 1, network, mirrored=False)
        before = peer.state.outer.slow.phi.clone()
        peer.train(H)
        plain = [_step(site, peer) for _ in range(PLAIN_STEPS)][1:]
        swap = Swap(site, peer, network, codec)
        result = swap.run(median(plain))
        waited = Swap(site, peer, network, codec)
        again = waited.run(median(plain), queued=True)
        peer.exchange.close()  # type: ignore[union-attr]
    missing = len(swap.parts) - swap.corrected + len(waited.parts) - waited.corrected
    moved = not torch.equal(peer.state.outer.slow.phi, before) and bool(peer.state.outer.slow.phi.isfinite().all())
    merged = result.outcome is again.outcome is Outcome.MERGED
    right = merged and missing == 0 and moved and waited.drained == 0
    unseen = site.accelerator and not waited.judged
    figures = swap.figures(median(plain))
    words = (
        f"{figures['share']:.1%} of a step over {figures['steps']} steps and {len(swap.parts)} parts, {len(before):,} "
        f"parameters; a step takes {figures['step_ratio']:.2f} times as long as without a swap; "
    )
    words += UNSEEN if unseen else f"none of {waited.judged} looks waited for the device"
    fault = (
        f"{result.outcome}: {result.detail}; {again.outcome}: {again.detail}; {missing} of 2 x {len(swap.parts)} parts "
        f"were not corrected; {waited.drained} looks waited for the device"
    )
    verdict = None if right and unseen else right
    return Finding(f"swap's share of a step, {codec}", verdict, words if right else fault, figures)


class Swap:
    """One overlapped swap, step by step."""

    def __init__(self, site: Site, peer: Sharer, network: LoopThread, codec: str) -> None:
        self._site, self._peer, self._network, self._codec = site, peer, network, codec
        self.corrected = self.judged = self.drained = 0
        self.parts: list[tuple[int, int]] = []
        self._between: list[float] = []  # seconds
        self._steps: list[float] = []

    def run(self, pace: float, *, queued: bool = False) -> Averaged:
        """``queued``: the device has other work at some looks. ``judged``: those whose own work, as the looks before
        them show, takes less time. ``drained``: those of them that waited for it.
        """
        with partner(self._site, self._peer, self._network, self._codec) as stream:
            group = Group(0, (Link("partner", "partner", stream),), step_seconds=pace)
            mailbox = self._peer.exchange.start(lambda: group)  # type: ignore[union-attr]
            self.parts, opening = mailbox.parts, PartOpening(self._peer.method, mailbox.parts)
            while not mailbox.parts_to_open(idle=True) and mailbox.result() is None:  # the headers are on their way
                mailbox.wait(0.01)
            busy, own = ENOUGH * self._site.busy_seconds() if queued else 0.0, list[float]()
            for look in range(MOST_STEPS):
                result = mailbox.result()
                self._site.synchronize()
                began = time.monotonic()
                backlog = self._site.keep_busy() if queued and (look + 1) % QUEUED_EVERY == 0 else None
                self.corrected += amend_parts(self._peer.method, mailbox)
                open_parts(opening, mailbox, mailbox.parts_to_open(), wait=False)
                if backlog is None:
                    own.append(time.monotonic() - began)
                elif max(own[1 - QUEUED_EVERY :]) < busy:
                    self.judged += 1
                    self.drained += backlog.query()
                self._site.synchronize()
                self._between.append(time.monotonic() - began)
                if result is not None:
                    return result
                self._steps.append(_step(self._site, self._peer))
        raise AssertionError("the swap has not ended")

    def figures(self, plain: float) -> dict[str, float]:
        whole = [step + between for step, between in zip(self._steps, self._between, strict=False)]
        return {
            "share": sum(self._between) / sum(whole),
            "largest_share": max(between / step for step, between in zip(whole, self._between, strict=False)),
            "step_ratio": median(whole) / plain,
            "steps": len(self._steps),
            "step_seconds": plain,
        }


def _step(site: Site, peer: Sharer) -> float:
    site.synchronize()
    began = time.monotonic()
    peer.train(1)
    site.synchronize()
    return time.monotonic() - began


@contextlib.contextmanager
def partner(site: Site, peer: Sharer, network: LoopThread, codec: str) -> Iterator[Stream]:
    """A process with the same slow weights; the stream to it."""
    slow = peer.state.outer.slow
    file = Path(site.folder, "phi.bin")
    slow.phi.numpy().tofile(file)
    change = float((fast(slow) - slow.phi).double().square().mean().sqrt())
    arrived: asyncio.Queue[Stream] = asyncio.Queue()

    async def listen() -> asyncio.Server:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await arrived.put(Stream(reader, writer, remote="partner", initiator=False))

        return await asyncio.start_server(take, "127.0.0.1", 0)

    server = network.call(listen(), 5)
    port = server.sockets[0].getsockname()[1]
    program = [sys.executable, "-m", "tests.gpu.programs.partner", str(port), codec, str(file), str(change)]
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield network.call(arrived.get(), START)
        process.wait(START)
    finally:
        network.loop.call_soon_threadsafe(server.close)
        if process.poll() is None:
            process.kill()
            process.wait(10)
        file.unlink()
