"""Child processes that end with this process: each holds the other end of a pipe and stops when it closes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peer.errors import RunError
from peer.process import Stop
from peer.training.run_folder import require_folder

READY_LINE = re.compile(r" ready: .*\bhttp=(\S+)")  # a bootstrap node prints it when it listens
STOP_SECONDS = 900.0  # to finish a step and a swap, and to save: a large model's checkpoint takes minutes


class Child:
    """One ``python -m MODULE ...`` in a session of its own, its output in ``console``.

    ``environment``: what differs from this process's.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        console: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.console, self.arguments = name, console, list(arguments)
        self._environment = environment or {}
        self._module, self.restarts = module, 0
        require_folder(console.parent)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.console.open("ab") as output:
            self._begins = output.tell()
            return subprocess.Popen(
                [sys.executable, "-m", self._module, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
            )

    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll()

    @property
    def crashed(self) -> bool:
        """It has ended, but neither regularly (0) nor because of wrong options (2)."""
        return self.exit_code() not in (None, 0, 2)

    def restart(self) -> str:
        """Start it again; returns how it had ended, as text."""
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"failed: {self.last_line()}"
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.restarts += 1
        self._process = self._start()
        return how

    def ask_to_stop(self) -> None:
        """Send SIGINT once; a second one would make it exit without saving."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic seconds), then kill it."""
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def output(self) -> str:
        """Its output since the last start."""
        with self.console.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode(errors="replace")

    def last_line(self) -> str:
        """The last line of its output; the last ``error:`` line when there is one."""
        lines = self.output().strip().splitlines()[-200:]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or ["it printed nothing"])[-1]


def stop_all(children: Sequence[Child]) -> None:
    """Ask all to stop, then wait for all, with one deadline."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        child.wait(deadline)


def monitor_of(bootstrap: Child, timeout: float, stop: Stop) -> str:
    """Wait for the bootstrap node; HOST:PORT of its page, empty after a stop. Raises :class:`RunError` when it ends or
    is late.
    """
    deadline = time.monotonic() + timeout
    while not (ready := READY_LINE.search(bootstrap.output())):
        if stop.requested:
            return ""
        if bootstrap.exit_code() is not None:
            raise RunError(f"the bootstrap node ended: {bootstrap.last_line()}")
        if time.monotonic() > deadline:
            raise RunError(f"the bootstrap node did not start within {timeout:.0f} s; see {bootstrap.console}")
        time.sleep(0.05)
    return ready[1]
