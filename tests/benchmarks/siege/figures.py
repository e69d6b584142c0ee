"""What is measured of the honest peers and the bootstrap node."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import psutil

from tests.swarm.support.harness import Process, Swarm


@contextlib.contextmanager
def watched(swarm: Swarm, names: Sequence[str]) -> Iterator[dict[str, float]]:
    """What these peers did in the context; the figures are there after it."""
    figures: dict[str, float] = {}
    first, began = {name: len(swarm.rounds(name)) for name in names}, time.monotonic()
    yield figures
    rows = [row for name, start in first.items() for row in swarm.rounds(name)[start:]]
    took = sum(sum(row["seconds"].values()) for row in rows)
    idle = sum(row["seconds"]["match"] + row["seconds"]["exchange"] for row in rows)
    merged = sum(row["outcome"] == "merged" for row in rows)
    figures["merged"] = round(merged / len(rows), 3) if rows else 0.0
    figures["merges_a_minute"] = round(60 * merged / (time.monotonic() - began) / len(names), 1)
    figures["idle"] = round(idle / took, 3) if took else 1.0
    figures["loss"] = fmean(row["train_loss"] for row in rows) if rows else float("nan")


def met(swarm: Swarm, names: Sequence[str], hostile: str) -> int:
    """Rounds of these peers with the ``hostile`` one, however they ended."""
    return sum(hostile in (row["partner"] or "").split(",") for name in names for row in swarm.rounds(name))


class Memory:
    """``growth``: the largest that any of these processes has reached, with its children, in MiB."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._start = {process: _resident(process) for process in processes}
        self.growth = 0.0

    def look(self) -> None:
        """Once more."""
        growth = max(_resident(process) - start for process, start in self._start.items())
        self.growth = max(self.growth, round(growth / 2**20, 1))


def _resident(process: Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return sum(it.memory_info().rss for it in (root, *root.children(recursive=True)))
    return 0


def monitor_answers(bootstrap: Process) -> bool:
    """Are its metrics and the page's figures of the swarm what their readers can read?"""
    url = "http://" + bootstrap.line(r"http=(\S+)")[1]
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            named = b"noloco_swarm_" in answer.read()
        with urllib.request.urlopen(f"{url}/swarm.json", timeout=10) as answer:
            json.loads(answer.read(), parse_constant=_not_json)
        return named
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _not_json(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
