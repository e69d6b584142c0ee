"""One run of a method by real peers in the network laboratory, one of them at half speed: waiting, bytes and loss."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from peer.launch.tail import Tail
from peer.rounds import Outcome
from tests.netlab.peers import LabSwarm
from tests.netlab.plan import Plan

PERIOD = 0.05  # seconds of the straggler's duty cycle


@dataclass(frozen=True)
class Job:
    """``overrides`` are ``--set`` of every peer. ``seconds``: after so long it is given up."""

    name: str
    config: str
    overrides: tuple[str, ...]
    peers: int
    seconds: float
    inner_steps: int


class Straggler:
    """Lets a process run half of the time, as cpulimit does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._end = process, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(ProcessLookupError):
            while not self._end.is_set() and self._process.poll() is None:
                self._process.send_signal(signal.SIGSTOP)
                time.sleep(PERIOD / 2)
                self._process.send_signal(signal.SIGCONT)
                time.sleep(PERIOD / 2)

    def stop(self) -> None:
        self._end.set()
        self._thread.join(5)


def run(plan: Plan, job: Job, folder: Path) -> dict[str, Any]:
    """The figures of one method."""
    names = [f"peer-{index}" for index in range(job.peers)]
    with LabSwarm(plan, job.peers, folder) as swarm, ExitStack() as stack:
        processes = [swarm.peer(index + 1, name, job.config, job.overrides) for index, name in enumerate(names)]
        swarm.wait_for(lambda: all((folder / name / "evals.jsonl").exists() for name in names))
        stack.callback(Straggler(processes[-1]).stop)
        deadline = time.monotonic() + job.seconds
        for name, process in zip(names, processes, strict=True):
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{job.name}: {name} did not end within {job.seconds:.0f} s; see {folder}") from None
            if code:
                raise RuntimeError(f"{job.name}: {name} failed; see {folder / name}")
        return _figures([swarm.tail(name) for name in names], job.inner_steps)


def _figures(tails: Sequence[Tail], inner_steps: int) -> dict[str, Any]:
    """``idle_share`` leaves out the first round and the last H steps, in which every method waits for its last swap."""
    rows = [row for tail in tails for row in tail.rounds]
    merged = [row for row in rows if row["outcome"] == Outcome.MERGED]
    middle = [row for tail in tails for row in tail.rounds[1:] if row["step"] <= tail.rounds[-1]["step"] - inner_steps]
    wall = [sum(sum(row["seconds"].values()) for row in tail.rounds) for tail in tails]
    return {
        "idle_share": _idle(middle or rows),
        "idle_share_of_all": _idle(rows),
        "val_loss": mean(tail.evals[-1]["val_loss"] for tail in tails),
        "bytes_per_round": median(row["bytes_sent"] for row in merged) if merged else 0,
        "rounds_merged": len(merged) / len(rows),
        "staleness_steps": mean(row["staleness"] for row in merged) if merged else 0.0,
        "seconds": max(wall),
        "losses": mean_curve([_curve(tail) for tail in tails]),
    }


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Seconds and training loss, both means over the peers, round by round as far as all have come."""
    return [(round(mean(it[0] for it in row), 2), mean(it[1] for it in row)) for row in zip(*curves, strict=False)]


def _curve(tail: Tail) -> list[tuple[float, float]]:
    seconds, curve = 0.0, []
    for row in tail.rounds:
        seconds += sum(row["seconds"].values())
        if row["train_loss"] is not None:
            curve.append((seconds, row["train_loss"]))
    return curve


def _idle(rows: Sequence[dict[str, Any]]) -> float:
    idle = sum(row["seconds"]["match"] + row["seconds"]["exchange"] for row in rows)
    return idle / sum(sum(row["seconds"].values()) for row in rows)
