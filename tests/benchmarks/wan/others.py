"""A run of another library (reference.py) in the network laboratory, with the figures of figures.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from tests.benchmarks.wan.figures import mean_curve
from tests.benchmarks.wan.reference import Seat
from tests.benchmarks.wan.swarm import Job, Straggler
from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Plan
from tests.netlab.tun import DEVICE


def run(library: str, plan: Plan, job: Job, folder: Path) -> dict[str, Any]:
    """The figures of ``library``. The last peer is stopped half of the time, as in swarm.py."""
    with Lab(plan, job.peers + 1) as lab, ExitStack() as stack:

        def start(host: int, role: str, server: str, output: Any) -> subprocess.Popen[str]:
            seat = Seat(job.config, job.overrides, lab.address(host), host, job.peers, server, str(folder))
            words = [sys.executable, "-m", "tests.benchmarks.wan.reference", library, role, json.dumps(asdict(seat))]
            log = stack.enter_context((folder / f"{role}-{host}.log").open("wb"))
            process = subprocess.Popen(
                lab.command(host, words),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output or log,
                stderr=log,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE},
                start_new_session=True,
            )
            stack.callback(_end, process)
            return process

        server = start(0, "serve", "", subprocess.PIPE)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        hosts = range(1, job.peers + 1)
        peers = [start(host, "train", address, None) for host in hosts]
        deadline = time.monotonic() + job.seconds
        while len(list(folder.glob("*.ready"))) < job.peers:
            _check(peers, deadline, library, folder)
        before = lab.sent(*hosts)
        stack.callback(Straggler(peers[-1]).stop)
        while len(list(folder.glob("*.json"))) < job.peers:
            _check(peers, deadline, library, folder)
        return _figures(folder, (lab.sent(*hosts) - before) / job.peers, job.inner_steps)


def _check(peers: list[subprocess.Popen[str]], deadline: float, library: str, folder: Path) -> None:
    """Wait a little; raises if a peer has failed or the deadline has passed."""
    if any(peer.poll() for peer in peers) or time.monotonic() > deadline:
        logs = "\n".join(file.read_text(errors="replace")[-500:] for file in sorted(folder.glob("train-*.log")))
        raise RuntimeError(f"{library} failed or took too long:\n{logs}")
    time.sleep(0.2)


def _figures(folder: Path, sent: float, inner_steps: int) -> dict[str, Any]:
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return {
        "idle_share": sum(it["waited"] for it in found) / sum(it["seconds"] for it in found),
        "val_loss": mean(it["val_loss"] for it in found),
        "bytes_per_round": sent / (found[0]["steps"] / inner_steps),
        "seconds": max(it["seconds"] for it in found),
        "losses": mean_curve([it["losses"] for it in found]),
    }


def _end(process: subprocess.Popen[str]) -> None:
    """End its whole session: both libraries start processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    if process.stdin is not None:
        process.stdin.close()
