"""Real processes for the swarm tests. Every wait has a deadline. A test ends the processes that it started, by id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.swarm.support.warm import Forked, warm

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
DEMO = ROOT / "configs" / "demo.yaml"
START = 60.0  # seconds for a process to be ready
PATIENCE = 5  # a wait is for an outcome: how long it may last on a busy machine says only when a test gives up

TINY = [
    "run.model.hidden_size=16",
    "run.model.intermediate_size=32",
    "run.model.layers=1",
    "run.model.heads=2",
    "run.data.sequence_length=16",
    "run.batch_size=2",
    "run.evaluation.batches=2",
    "peer.threads=1",
    "run.exchange.overlap=false",  # a phase of so small a model is shorter than a swap; tests of overlap say so
    "run.exchange.codec=none",
]


# a round of the tiny model waits a second for its line: for peers that only have to be there, as others need the cores
SLOW_LINE = "peer.network.max_upload=500kbit"


class Process:
    """A child with its output in a file; :meth:`line` waits for a line in it. ``cold``: not forked from warm.py."""

    def __init__(self, arguments: list[str], log: Path, env: dict[str, str] | None = None, cold: bool = False) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.popen: subprocess.Popen[bytes] | Forked
        if not cold:
            self.popen = warm().start(arguments, log, environment)
            return
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def line(self, pattern: str, seconds: float = START) -> re.Match[str]:
        """The first match in the output; fails if the process ends or the time is over."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.output())
            if found is None and self.popen.poll() is not None:
                found = re.search(pattern, self.output())
                assert found, f"ended with {self.popen.returncode} without {pattern!r}:\n{self.output()}"
            return found

        return wait_for(look, seconds, lambda: f"no {pattern!r} in:\n{self.output()}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def exit_code(self, seconds: float = START) -> int:
        """Wait for the end of the process."""
        try:
            return self.popen.wait(PATIENCE * seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}") from None


def wait_for(look: Callable[[], T | None], seconds: float, failure: Callable[[], str] = lambda: "too late") -> T:
    """Poll ``look``; its first true result. ``seconds``: on a machine that does nothing else."""
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {PATIENCE} x {seconds} s: {failure()}"
        time.sleep(0.05)


class Swarm:
    """Starts processes in a folder and keeps track of them, their children and their sockets."""

    def __init__(self, folder: Path, cold: bool = False) -> None:
        self.folder, self._cold = folder, cold
        self.processes: list[Process] = []
        self._seen: dict[int, psutil.Process] = {}

    def start(self, name: str, arguments: list[str], env: dict[str, str] | None = None) -> Process:
        process = Process(arguments, self.folder / f"{name}.out", env, self._cold)
        self.processes.append(process)
        return process

    def bootstrap(self, *arguments: str, name: str = "bootstrap", port: int = 0) -> tuple[Process, str]:
        """A bootstrap node and its address."""
        process = self.start(
            name,
            [
                *("-m", "dht_bootstrap", "--host", "127.0.0.1", "--port", str(port), "--http-port", "0"),
                *("--identity", str(self.folder / f"{name}.key"), *arguments),
            ],
        )
        return process, process.line(r"initial peer: (\S+)").group(1)

    def peer(self, name: str, *sets: str, address: str = "", env: dict[str, str] | None = None) -> Process:
        """``noloco-peer train`` with the tiny model on loopback."""
        return self.start(name, self.train(name, *sets, address=address), env)

    def train(self, name: str, *sets: str, address: str = "") -> list[str]:
        """The command line of :meth:`peer`."""
        common = [f"run.dir={self.folder}", f"peer.name={name}", "peer.network.host=127.0.0.1", "peer.metrics.port=0"]
        overrides = [word for override in (*TINY, *common, *sets) for word in ("--set", override)]
        joined = ["--initial-peers", address] if address else []
        return ["-m", "peer", "train", "--config", str(DEMO), *overrides, *joined]

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a peer's rounds.jsonl."""
        path = self.folder / name / "rounds.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_rounds(self, name: str, count: int, seconds: float = START) -> list[dict[str, Any]]:
        """Wait until a peer has finished ``count`` rounds."""
        return wait_for(
            lambda: rows if len(rows := self.rounds(name)) >= count else None,
            seconds,
            lambda: f"{name} has {len(self.rounds(name))} rounds:\n" + "\n".join(p.output() for p in self.processes),
        )

    def note_children(self) -> None:
        """Remember the current process tree for :meth:`left_over`."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for member in (root, *root.children(recursive=True)):
                    self._seen[member.pid] = member

    def left_over(self) -> list[str]:
        """Our processes and socket folders that still exist when everything should be gone."""
        left = [f"process {member.pid} {member.name()}" for member in self._seen.values() if running(member)]
        pids = {str(pid) for pid in self._seen} | {str(process.pid) for process in self.processes}
        folders = Path(tempfile.gettempdir()).glob("noloco-*-*")
        return left + [str(folder) for folder in folders if folder.name.split("-")[1] in pids]

    def end(self) -> None:
        """Kill the processes that still run, by id."""
        self.note_children()
        for member in self._seen.values():
            if running(member):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(signal.SIGCONT)
                    member.kill()
        for process in self.processes:
            process.popen.wait(10)


def running(member: psutil.Process) -> bool:
    """Does it run? Zombies have ended, and another process may have the id now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """An occupied port of 127.0.0.1."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def clock_ahead(folder: Path, seconds: float) -> dict[str, str]:
    """The environment for a process whose clock is ahead; makes ``folder`` for it."""
    folder.mkdir()
    code = f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n"
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}
