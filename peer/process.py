"""What ends or pauses a process: signals, the end of its parent, requests that any thread may read. Child processes.

The first SIGINT, SIGTERM or SIGHUP requests a stop, a second one that is not SIGHUP ends the process. Before the loop
runs the first signal raises ``KeyboardInterrupt``. In a command without a loop every signal does. It is never raised
within an import.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from peer import clock
from peer.logs import get_logger
from peer.rounds.progress import Progress

log = get_logger("signals")

CONTAINER = "/sys/fs/cgroup"  # what its control group may use
IMPORT_LOOK = 0.05  # seconds between two looks whether an import has ended
REAP_SECONDS = 5.0  # for a child that was killed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_ON_HEAP = 32 * 2**20  # bytes: the most to which glibc raises it by itself, until the other one is set
KEPT_BYTES = 256 * 2**20  # the two tensors of 128 parts; more would be missed by other programs
LEAST_WAIT = 0.1  # seconds for a child to end when the deadline of all has passed


class Signals:
    """Installed once by the main thread. ``emergency`` runs before an immediate end. ``work``: what is done before."""

    def __init__(self, stop: Stop, work: str = "finishing the step, saving, leaving") -> None:
        self.stop, self._work = stop, work
        self.looping = False
        self.emergency: Callable[[], None] = lambda: None
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop.requested:
            if number == signal.SIGHUP:  # a terminal that is closed may send it twice
                return
            self.emergency()
            os._exit(1)
        self.stop.request()
        if not self.looping:
            interrupt(number, frame)
            return
        log.info("asked to stop: %s; once more to stop now", self._work)

    def begin_loop(self) -> None:
        """From now on a signal is a request, and one that waits for the end of an import is no more."""
        self.looping = True
        if signal.getsignal(signal.SIGALRM) is interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal: raises ``KeyboardInterrupt``, and while an import runs not before its end.

    Who imports a module that is half there fails in any way, later or at once, or takes it for one that is missing.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, IMPORT_LOOK)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def stop_signals() -> list[signal.Signals]:
    """Those that ask a command to stop. A lost terminal sends SIGHUP, which nohup lets it ignore."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def begin_command() -> None:
    """A signal raises ``KeyboardInterrupt``, so that the command removes what it has made."""
    for number in stop_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed (>&-)
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process


def cores() -> int:
    """Those that this process can use: in a job or a cpuset few of the machine's, with a quota of time its worth."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, _quota() or found)


def _quota() -> int | None:
    """The cores whose time a container may take, rounded up (docker's ``--cpus``): of cgroups version 2, then 1."""
    for names in ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        with suppress(OSError, ValueError):  # the other version; "max", which is none
            quota, period = map(int, " ".join(Path(CONTAINER, it).read_text(encoding="ascii") for it in names).split())
            if quota > 0 and period > 0:
                return math.ceil(quota / period)
    return None


def keep_freed_memory() -> None:
    """The next parts of a swap take the memory that the last ones have left. By itself glibc gives it back at once, and
    the system zeroes each page again. macOS and musl stay as they are.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def stop_with_parent() -> None:
    """Stop when the process at the other end of the standard input has ended."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held at interpreter shutdown
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Child:
    """One ``python -m MODULE ...`` in a session of its own: signals of the terminal are not for it. Its output is in
    ``console``. It holds the other end of a pipe, for :func:`stop_with_parent`.

    ``environment``: what differs from this process's.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], console: Path, environment: Mapping[str, str] | None
    ) -> None:
        self.name, self.console, self.arguments = name, console, list(arguments)
        self._environment = environment or {}
        self._module, self.restarts = module, 0
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

    @property
    def pid(self) -> int:
        return self._process.pid

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
        self.end()
        self.restarts += 1
        self._process = self._start()
        return how

    def ask_to_stop(self) -> None:
        """Send SIGINT once; a second one would make it exit without saving."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic seconds), then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(LEAST_WAIT, deadline - clock.monotonic()))
        self.end()

    def end(self) -> None:
        """Kill it, if it runs."""
        self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it is as good as gone
            self._process.wait(REAP_SECONDS)

    def output(self) -> str:
        """Its output since the last start."""
        try:
            with self.console.open("rb") as file:
                file.seek(self._begins)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def last_line(self) -> str:
        """The last line of its output; the last ``error:`` line when there is one."""
        lines = self.output().strip().splitlines()[-200:]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or ["it printed nothing"])[-1]


class Stop:
    """A request to stop: made by a signal handler, read by any thread."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """The request is permanent."""
        self.requested = True


class Pause:
    """``requested``: by a person or by the hours (training/pausing), withdrawn in the same way. ``resting``: the
    training thread has not gone on yet (training/pausing). Read by any thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._rests: tuple[float, float | None] = 0.0, None  # seconds of those that ended; when the current one began

    @contextmanager
    def rest(self) -> Iterator[None]:
        """The training thread rests. After an error it rests for ever: this peer meets nobody any more."""
        before, began = self.seconds, clock.monotonic()
        self._rests = before, began
        yield
        self._rests = before + clock.monotonic() - began, None

    @property
    def resting(self) -> bool:
        return self._rests[1] is not None

    @property
    def seconds(self) -> float:
        """Of all rests so far, with the current one."""
        before, began = self._rests
        return before if began is None else before + clock.monotonic() - began

    @property
    def active(self) -> bool:
        """This peer is paused, as others see it."""
        return self.requested or self.resting


@dataclass(frozen=True)
class LoopContext:
    """The inner loop's progress, and the requests that end or pause it."""

    progress: Progress = field(default_factory=Progress)
    stop: Stop = field(default_factory=Stop)
    pause: Pause = field(default_factory=Pause)

    @property
    def away(self) -> bool:
        """This peer begins no step and no swap: it was asked to stop, or is paused."""
        return self.called_away or self.pause.resting

    @property
    def called_away(self) -> bool:
        """It was asked to stop or to pause. No more when it comes back from a pause, which rests until then."""
        return self.stop.requested or self.pause.requested
