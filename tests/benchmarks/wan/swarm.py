"""One run of a method by real peers in the network laboratory; the last peer runs at half speed."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.wan.figures import figures
from tests.netlab.peers import Child, LabSwarm
from tests.netlab.plan import Plan

PACED = "tests.benchmarks.wan.paced_peer"
PERIOD = 0.05  # seconds of the straggler's duty cycle


@dataclass(frozen=True)
class Job:
    """``overrides`` are ``--set`` of every peer. ``seconds``: the time limit of the run.

    ``pace``: least seconds of an inner step (paced_peer.py), twice that for the last peer. With 0 no peer is paced, and
    the last one is stopped half of the time.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    peers: int
    seconds: float
    inner_steps: int
    pace: float = 0.0


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
    """The figures of one method, and the load of this machine's cores while all trained."""
    names = [f"peer-{index}" for index in range(job.peers)]
    with LabSwarm(plan, job.peers, folder) as swarm, ExitStack() as stack:
        processes = [_start(swarm, job, index, name) for index, name in enumerate(names)]
        swarm.wait_for(lambda: all((folder / name / "evals.jsonl").exists() for name in names))
        if not job.pace:
            stack.callback(Straggler(processes[-1]).stop)
        deadline = time.monotonic() + job.seconds
        swarm.wait_for(lambda: bool(swarm.tail(names[0]).rounds) or processes[0].poll() is not None, job.seconds)
        before, busy = psutil.cpu_times(), None
        for name, process in zip(names, processes, strict=True):
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{job.name}: {name} did not end within {job.seconds:.0f} s; see {folder}") from None
            if code:
                raise RuntimeError(f"{job.name}: {name} failed; see {folder / name}")
            busy = busy or _busy(before)
        return {**figures([swarm.tail(name) for name in names], job.inner_steps), "cores_busy": busy}


def _start(swarm: LabSwarm, job: Job, index: int, name: str) -> Child:
    if not job.pace:
        return swarm.peer(index + 1, name, job.config, job.overrides)
    pace = job.pace * (2 if index == job.peers - 1 else 1)
    more = {"PACE": str(pace)}
    return swarm.peer(index + 1, name, job.config, job.overrides, module=PACED, environment=more)


def _busy(before: Any) -> float:
    """The share of core time since ``before`` that was not idle."""
    passed = {key: value - getattr(before, key) for key, value in psutil.cpu_times()._asdict().items()}
    return 1 - (passed["idle"] + passed["iowait"]) / sum(passed.values())
