"""A bootstrap node and peers, each on its own host in the laboratory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.netlab.lab import ROOT, Lab
from tests.netlab.plan import Plan
from tests.swarm.support.warm import Forked, warm
from tests.whole_tail import WholeTail

Child = subprocess.Popen[bytes] | Forked
START = 120.0  # seconds to be ready on a loaded machine
PORT = 31337


class LabSwarm:
    """The bootstrap node is on host 0. The exit ends all processes. ``warm``: fork them, see tests/swarm/support."""

    def __init__(self, plan: Plan, peers: int, folder: Path, *, warm: bool = False) -> None:
        self._plan, self._peers, self.folder, self._warm = plan, peers, folder, warm

    def __enter__(self) -> LabSwarm:
        self._stack = ExitStack()
        try:
            self.lab = self._stack.enter_context(Lab(self._plan, self._peers + 1))
            self.start_bootstrap()
            file = self.folder / "addresses"
            self.wait_for(file.exists)
            self.address = file.read_text(encoding="utf-8").split()[0]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_bootstrap(self) -> None:
        """Start or restart it, always with the same identity and port."""
        arguments = ["--host", self.lab.address(0), "--port", str(PORT), "--http-port", "0", "--stop-with-parent"]
        arguments += ["--identity", str(self.folder / "bootstrap.key")]
        arguments += ["--addresses-file", str(self.folder / "addresses")]
        self.bootstrap = self.start(0, "dht_bootstrap", arguments, self.folder / "bootstrap.log")

    def peer(
        self,
        host: int,
        name: str,
        config: str | Sequence[str],
        overrides: Sequence[str],
        *,
        module: str = "peer",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """``noloco-peer train`` on ``host``, or ``module`` in its place. Training begins when all peers are there."""
        own = [f"run.dir={self.folder}", f"peer.name={name}", f"peer.network.host={self.lab.inside(host)}"]
        own += ["peer.threads=1", "peer.metrics.port=0", "peer.network.upnp=false", f"peer.start_with={self._peers}"]
        sets = [word for it in (*own, *overrides) for word in ("--set", it)]
        files = [config] if isinstance(config, str) else config
        arguments = ["train", "--config", *files, *sets, "--initial-peers", self.address, "--stop-with-parent"]
        return self.start(host, module, arguments, self.folder / f"{name}.log", environment)

    def tail(self, name: str) -> WholeTail:
        """The rounds that a peer has written so far."""
        tail = WholeTail(name, self.folder / name)
        tail.poll()
        return tail

    def wait_for(self, look: Callable[[], bool], seconds: float = START) -> None:
        """Wait until ``look`` is true; raises ``RuntimeError`` after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not look():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds:.0f} s; see {self.folder}")
            time.sleep(0.1)

    def start(
        self, host: int, module: str, arguments: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> Child:
        """``python -m module`` on ``host``."""
        environment = {**os.environ, **(more or {})}
        if self._warm:
            forked = warm().start(["-m", module, *arguments], log, environment, self.lab.namespace(host))
            self._stack.callback(_end, forked)
            return forked
        command = self.lab.command(host, [sys.executable, "-m", module, *arguments])
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self._stack.callback(_end, process)
        return process


def _end(process: Child) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    if isinstance(process, subprocess.Popen) and process.stdin is not None:
        process.stdin.close()
