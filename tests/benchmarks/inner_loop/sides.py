"""The sides of whole_peer.py, each a process: a peer of a live swarm, its partner, and bare loops.

python -m tests.benchmarks.inner_loop.sides bare|peer CORE [NODES_CORE ADDRESS ROUNDS]   (started by whole_peer.py)

Each prints a line of JSON for a round: the seconds since the line before, by the wall and as they would be on a machine
with nothing else to do. The latter are by the kernel's count of what a thread computed and waited for a core
(/proc/.../schedstat), because other work on the measuring machine must not count as the peer's cost.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from peer import logs
from peer.config import load as settings
from peer.config.schema import Config
from peer.data import corpus
from peer.process import Signals, Stop
from peer.replica import model
from peer.replica.inner_loop import InnerReport
from peer.replica.optimizer import inner_optimizer, torch_muon
from peer.training.assemble import assembled
from peer.training.trainer import Trainer
from tests.benchmarks.bare_loop import BareLoop

CONFIG = Path("configs/demo.yaml")
SETS = ("run.steps=100000", "peer.checkpoint.every_rounds=4", "peer.threads=1", "peer.network.host=127.0.0.1")


def config(*sets: str) -> Config:
    """The demo's run, with an evaluation and a checkpoint every four rounds."""
    return settings.load(CONFIG, [*SETS, *sets])


@dataclass(frozen=True)
class Spent:
    """Seconds until now. ``alone``: of the training thread, without its waiting for a core; ``ran``: that it computed,
    so without its waiting for another thread; ``core``: of all processors, by the process and those that it started.
    """

    wall: float
    alone: float
    ran: float
    core: float

    @classmethod
    def now(cls) -> Spent:
        wall, alone, ran = training_thread()
        started = [_schedstat(it) for child in psutil.Process().children(True) for it in _tasks(child.pid)]
        return cls(wall, alone, ran, time.process_time() + sum(it[0] for it in started))

    def since(self, before: Spent) -> dict[str, float]:
        return {name: value - getattr(before, name) for name, value in vars(self).items()}


def training_thread() -> tuple[float, float, float]:
    """``wall``, ``alone`` and ``ran`` of :class:`Spent`, of the thread that calls."""
    wall = time.monotonic()
    ran, waited = _schedstat(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return wall, wall - waited, ran


def _schedstat(file: str) -> tuple[float, float]:
    """Seconds that a thread has run, and that it was ready and had no core."""
    try:
        ran, waited, _ = Path(file).read_text(encoding="ascii").split()
    except OSError:  # it has ended
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return [f"/proc/{pid}/task/{it}/schedstat" for it in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    return []


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def bare(core: int) -> None:
    """H steps a round, as many rounds as each line of the standard input says."""
    os.sched_setaffinity(0, {core})
    whole = config()
    network = model.build(whole.run)
    text = torch.from_numpy(corpus.load(whole.run.data).train)
    loop = BareLoop(network, inner_optimizer(network, whole.run.inner, torch_muon), whole, text)
    loop.run(loop.batches(5))
    say(ready=True)
    for rounds in sys.stdin:
        for _ in range(int(rounds)):
            before = Spent.now()
            loop.run(loop.batches(whole.run.inner_steps))
            say(**Spent.now().since(before))


def peer(core: int, node: int, address: str, rounds: int) -> None:
    """A peer that trains on ``core``; all its other threads and its p2p daemon are on ``node``."""
    os.sched_setaffinity(0, {node})
    with tempfile.TemporaryDirectory() as folder, _joined(folder, address) as trainer:
        say(ready=True, address=trainer.member.node.addresses[0])
        sys.stdin.readline()
        watched = Watched(trainer, core, node, rounds)
        trainer.loop()
        watched.done()


@contextmanager
def _joined(folder: str, address: str) -> Iterator[Trainer]:
    signals = Signals(Stop())
    signals.begin_loop()
    with assembled(config(f"run.dir={folder}", f"peer.initial_peers=[{address}]"), signals) as trainer:
        yield trainer


class Watched:
    """Says what each round of a trainer took, from boundary to boundary; requests a stop after some rounds.

    ``steps``: seconds ``alone`` of its inner steps with the work between them, while a swap runs and while none does.
    """

    def __init__(self, trainer: Trainer, core: int, node: int, rounds: int) -> None:
        self._trainer, self._core, self._node, self._left = trainer, core, node, rounds
        boundary = trainer.boundary
        self._cross, boundary.cross = boundary.cross, self.cross  # type: ignore[method-assign]
        self._between, boundary.between_steps = boundary.between_steps, self.between_steps  # type: ignore[method-assign]
        self._pin()
        self._new_round()

    def _new_round(self) -> None:
        self._steps: dict[str, list[float]] = {"swap": [], "rest": []}
        self._kind, self._began = "", 0.0
        self._before, self._totals = Spent.now(), self._trainer.timer.totals

    def between_steps(self) -> None:
        """The trainer's look at the swap: here one step with its work ends and the next one begins."""
        _, now, _ = training_thread()
        if self._kind:
            self._steps[self._kind].append(now - self._began)
        self._between()
        self._kind = "rest" if self._trainer.boundary._swap is None else "swap"  # type: ignore[attr-defined]
        self._began = now

    def cross(self, inner: InnerReport) -> bool:
        """The trainer's boundary, after the round before it was said."""
        now, totals, last = Spent.now(), self._trainer.timer.totals, self._trainer.member.reporter.last
        phases = {name: total - self._totals[name] for name, total in totals.items()}
        say(
            **now.since(self._before),
            phases=phases,
            outcome=last.averaged.outcome if last else None,
            steps=self._steps,
        )
        self._left -= 1
        if not self._left:
            self._trainer.stop.request()
        self._pin()
        self._new_round()
        return self._cross(inner)

    def done(self) -> None:
        """The partner is still there: stay until it has been told."""
        say(done=True)
        sys.stdin.readline()

    def _pin(self) -> None:
        """The training thread to its core; a thread that it has started inherits that, and belongs to the node's."""
        own = threading.get_native_id()
        for thread in map(int, os.listdir("/proc/self/task")):  # noqa: PTH208
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, {self._core if thread == own else self._node})


def main(kind: str, core: str, node: str = "", address: str = "", rounds: str = "0") -> None:
    logs.quiet_libraries()
    torch.set_num_threads(1)
    if kind == "bare":
        bare(int(core))
    else:
        peer(int(core), int(node), address, int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
