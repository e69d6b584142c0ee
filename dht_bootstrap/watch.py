"""Reads the directory every few seconds, for as long as the bootstrap node runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping

from dht_bootstrap.contributors import Contributors
from dht_bootstrap.history import NAMED, RunHistory
from peer.errors import RunError, one_line
from peer.logs import get_logger
from peer.p2p.dial import count_peers
from peer.p2p.node import Node
from peer.p2p.stream import MESSAGE_TIMEOUT, Stream
from peer.swarm.directory.ended import ENDED_RUNS, NoMore
from peer.swarm.directory.reader import Entry, Onlooker

log = get_logger("watch")
READ_PERIOD = 2.0  # seconds
LEAST_READ_PAUSE = 0.2  # seconds after a reading that took about a period or longer
READ_TIMEOUT = 20.0  # seconds
STALE = 30.0  # seconds after which the last reading is too old
SILENT_SECONDS = 3600.0  # after which members are lost although no other node says so


class Silence:
    """Have the other nodes fallen silent? Not before one has answered, and not where records still come: peers behind a
    NAT are no nodes, and write theirs here.
    """

    def __init__(self) -> None:
        self._answered = False  # a node has, and no record has come since the last answer
        self._newest: float | None = None  # at the first look without an answer

    def look(self, newest: float, *, alone: bool) -> bool:
        """``newest``: when the newest record ends; ``alone``: no other node answers."""
        if not alone:
            self._answered, self._newest = True, None
            return False
        if self._newest is None:
            self._newest = newest
        self._answered = self._answered and newest <= self._newest
        return self._answered


class Watch:
    """What is known of all runs. A thread that reads or changes ``runs`` holds ``lock``."""

    def __init__(self, node: Node, contributors: Contributors | None = None) -> None:
        self.node, self.contributors = node, contributors or Contributors()
        self.lock = threading.Lock()
        self.runs: dict[str, RunHistory] = {}
        self.reads = {"ok": 0, "failed": 0}
        self.read_seconds = 0.0
        self.connected = 0
        self._read_at: float | None = None  # monotonic
        self._silence = Silence()
        self._error = "the directory was not read yet"

    @property
    def read_age(self) -> float | None:
        return None if self._read_at is None else time.monotonic() - self._read_at

    @property
    def failure(self) -> str:
        """Why the directory cannot be read; empty while it can."""
        age = self.read_age
        if self.node.failure:
            return self.node.failure
        return self._error if age is None or age > STALE else ""

    def see(self, found: Mapping[str, Mapping[str, Entry]], now: float) -> None:
        """The directory was read; ``found``: by run and peer id. All live runs share the ``NAMED`` peers."""
        self.reads["ok"] += 1
        for run in sorted(found.keys() | self.runs.keys()):
            history = self.runs.setdefault(run, RunHistory(now))
            others = sum(len(it.peers) for it in self.runs.values() if it is not history and not it.ended_at)
            before = history.live()
            history.see(found.get(run, {}), now, NAMED - others)
            seen = before | history.live()  # who has just left tells its last figures
            self.contributors.see(run, [peer.record for peer in seen.values()], now)
        self.contributors.looked = now
        ended = [it for it in self.runs.values() if it.ended_at and it.peers]
        # anybody can invent a run; one that lasted is more likely to be a real one
        kept = sorted(ended, key=lambda it: it.ended_at - it.began, reverse=True)[:ENDED_RUNS]
        self.runs = {run: it for run, it in self.runs.items() if not it.ended_at or it in kept}

    async def read_on(self) -> None:
        """Read the directory until cancelled, on the node's thread."""
        onlooker = Onlooker(self.node)
        while True:
            began = time.monotonic()
            await self.read(onlooker)
            await asyncio.sleep(max(LEAST_READ_PAUSE, READ_PERIOD - (time.monotonic() - began)))

    async def read(self, onlooker: Onlooker) -> None:
        """Read the directory once; a failure is counted."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                found = await onlooker.look()
                self.connected = await count_peers(self.node.p2p)
            if self._cut_off(found, alone=onlooker.alone):
                raise RunError("no other node answers: the network of this one is cut, or all peers have died")
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises, the next look may be better
            self.reads["failed"] += 1
            self._error = f"the directory does not answer: {one_line(error)}"
            log.warning("%s", self._error)
        else:
            with self.lock:
                self.see(found, time.time())
            self._read_at = time.monotonic()
            self.read_seconds = self._read_at - began

    def _cut_off(self, found: Mapping[str, Mapping[str, Entry]], *, alone: bool) -> bool:
        """Members are missing that have not left, and the other nodes have fallen silent."""
        newest = max((it.expires for entries in found.values() for it in entries.values()), default=0.0)
        silent = self._silence.look(newest, alone=alone)
        missing = any(run.live().keys() - found.get(name, {}).keys() for name, run in self.runs.items())
        return silent and missing and (self.read_age or 0.0) < SILENT_SECONDS

    async def tell_of_ended(self, stream: Stream) -> None:
        """Answer a ``noloco-peer status`` (peer/swarm/directory/ended.py)."""
        now = time.time()
        with self.lock:
            ended = [run.last(name, now) for name, run in self.runs.items() if run.ended_at]
        for it in ended:
            await stream.send(it, MESSAGE_TIMEOUT)
        await stream.send_last(NoMore(), MESSAGE_TIMEOUT)
