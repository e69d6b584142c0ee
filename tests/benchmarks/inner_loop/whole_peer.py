"""tokens/s of a whole peer in a live swarm of two against a bare loop, turn by turn.

In each turn bare loops compute on both cores, then the peer and its partner do. The peer's training thread has a core
for itself while its other threads and its p2p daemon use the partner's core (``other_core``), or all that it is uses
one core (``shared_core``). What a round takes is told by sides.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean, median
from typing import Any

Row = dict[str, Any]
WARM = 2  # rounds of a peer before those that count: the first swap is fp16, and the partner has only begun
KINDS = {"other_core": "alone", "shared_core": "core"}  # and the seconds that a round costs (sides.py)
LIMIT = 3600.0  # seconds of a process


class Side:
    """A process of sides.py, which writes lines of JSON."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.inner_loop.sides", *map(str, words)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, bufsize=1, **pipes)
        self._limit = threading.Timer(LIMIT, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    @classmethod
    @contextmanager
    def started(cls, *words: object) -> Iterator[Side]:
        side = cls(*words)
        try:
            yield side
        finally:
            side._end()

    def tell(self, word: object) -> None:
        self._process.stdin.write(f"{word}\n")  # type: ignore[union-attr]

    def rows(self, count: int) -> list[Row]:
        """The next lines."""
        lines = [self._process.stdout.readline() for _ in range(count)]  # type: ignore[union-attr]
        return [json.loads(line) for line in lines]

    def _end(self) -> None:
        self._limit.cancel()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def whole_peer(turns: int, rounds: int) -> dict[str, Row]:
    """The figures of both kinds. ``rounds``: of a peer in a turn, without the first ones."""
    one, other = sorted(os.sched_getaffinity(0))[:2]
    found: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        loops = [stack.enter_context(Side.started("bare", core)) for core in (one, other)]
        for loop in loops:
            loop.rows(1)
        for turn in range(turns):
            for kind, rows in found.items():
                before = bare_rounds(loops, rounds // 2)
                peer = peer_rounds(one, other if kind == "other_core" else one, other, rounds)
                rows.append(compared(before + bare_rounds(loops, rounds // 2), peer, KINDS[kind]))
                print(f"{kind}, turn {turn + 1}: {rows[-1]}", flush=True)
    return {kind: summary(rows) for kind, rows in found.items()}


def bare_rounds(loops: list[Side], rounds: int) -> list[Row]:
    """Of the first loop, while the other one computes as well."""
    for loop in loops:
        loop.tell(rounds)
    first, _ = [loop.rows(rounds) for loop in loops]
    return first


def peer_rounds(core: int, node: int, other: int, rounds: int) -> list[Row]:
    """Of a peer; its partner is on the core ``other``."""
    with Side.started("peer", core, node, "", WARM + rounds) as peer:
        (ready,) = peer.rows(1)
        with Side.started("peer", other, other, ready["address"], 0) as partner:
            partner.rows(1)
            for side in (partner, peer):
                side.tell("go")
            return peer.rows(WARM + rounds)[WARM:]


def compared(bare: list[Row], peer: list[Row], seconds: str) -> Row:
    """A bare loop's time for a round, divided by the peer's. ``seconds``: which of them.

    ``swap``: a round's time if no step were longer while a swap runs, divided by its time.
    """
    usual = median(row[seconds] for row in bare)
    busy = [row["phases"]["eval"] + row["phases"]["checkpoint"] > 0 for row in peer]
    kinds = {
        "all": peer,
        "training": [row for row, it in zip(peer, busy, strict=True) if not it],
        "evaluating": [row for row, it in zip(peer, busy, strict=True) if it],
    }
    figures = {name: usual / mean(row[seconds] for row in rows) for name, rows in kinds.items() if rows}
    others = {
        name: median(row[name] for row in bare) / median(row[name] for row in kinds["training"])
        for name in ("wall", "alone", "ran", "core")
    }
    steps = [row["steps"] for row in peer if row["steps"]["swap"] and row["steps"]["rest"]]
    others["swap"] = median(swap_share(**it) for it in steps) if steps else math.nan
    merged = mean(row["outcome"] == "merged" for row in peer)
    return {name: round(it, 4) for name, it in {**figures, **others, "merged": merged}.items()}


def swap_share(swap: list[float], rest: list[float]) -> float:
    """Of the seconds of a round's steps while a swap runs and while none does: both kinds a few seconds apart."""
    return 1 - (sum(swap) - len(swap) * median(rest)) / sum(swap + rest)


def summary(turns: list[Row]) -> Row:
    """Median, lowest and highest over the turns, of each figure."""
    columns = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {name: {"median": median(it), "lowest": min(it), "highest": max(it)} for name, it in columns.items()}
