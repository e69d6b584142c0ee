"""Runs a make target again and again beside busy processes: which tests fail by chance?

    make flaky N=20

A line a run and a summary; exit code 1 when a run failed. The output of failed runs is kept. ``--json FILE`` keeps a
row of each run: 20 of them take longer than one may want to wait.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from tests.commit import commit

ROOT = Path(__file__).parents[1]
BUSY = 3
SPIN = """
import os, signal, sys
from tests.netlab.tun import die_with_parent
die_with_parent(signal.SIGKILL)
while os.getppid() == int(sys.argv[1]):  # it may have died before the line above
    pass
"""
CLEAN_UP = 60.0  # seconds for the tests to end their processes after Ctrl+C
INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")  # this program may run under make itself


@contextmanager
def busy(count: int) -> Iterator[None]:
    """``count`` processes that compute without a pause, and end with this one, however it ends."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())], cwd=ROOT) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def make(target: str, log: Path) -> int:
    """The exit code of ``make target``. When this program is interrupted, it is too."""
    own = {name: value for name, value in os.environ.items() if name not in INHERITED}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "--keep-going", target],
            cwd=ROOT,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                end(process)


def end(group: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: as Ctrl+C does, and after a while at once."""
    os.killpg(group.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        group.wait(CLEAN_UP)
    with suppress(ProcessLookupError):
        os.killpg(group.pid, signal.SIGKILL)
    group.wait()


def failures(log: Path) -> str:
    """The tests that failed, by pytest's summary; or make's last line."""
    text = log.read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return ", ".join(dict.fromkeys(names)) or (text.splitlines() or ["no output"])[-1]


def keep(file: Path, row: dict[str, object]) -> None:
    """Add a row to those of a file."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    of = {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    file.write_text(json.dumps([*rows, row | of], indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=BUSY, help="processes; 0 where others keep the processors busy")
    parser.add_argument("--target", default="test", help="of make")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a row of each run to those of this file")
    args = parser.parse_args()
    folder, failed, took = Path(tempfile.mkdtemp(prefix="flaky-")), 0, []
    with busy(args.busy):
        for run in range(1, args.runs + 1):
            log, began = folder / f"{run}.log", time.monotonic()
            code = make(args.target, log)
            took.append(time.monotonic() - began)
            if code:
                failed += 1
                said = f"failed: {failures(log)} ({log})"
            else:
                log.unlink()
                said = "passed"
            print(f"run {run} of {args.runs}: {took[-1]:.0f} s, {said}", flush=True)
            if args.json is not None:
                keep(args.json, {"target": args.target, "busy": args.busy, "seconds": round(took[-1]), "said": said})
    if not failed:
        folder.rmdir()
    seconds = f"{min(took):.0f} to {max(took):.0f} s a run" if took else "nothing ran"
    print(f"make {args.target} beside {args.busy} busy processes: {failed} of {args.runs} runs failed; {seconds}")
    return 1 if failed else 0


def interrupted(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    sys.exit(main())
