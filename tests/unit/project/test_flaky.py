"""``make flaky``: it counts failed runs, and its busy processes end with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.flaky import BUSY

ROOT = Path(__file__).parents[3]
LIMIT = 60.0  # seconds


def flaky(runs: int, target: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.flaky", "--runs", str(runs), "--target", target]
    command += ["--json", str(folder / f"{target}.json"), *options]
    own = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_each_run_has_a_line_and_a_failed_one_is_counted(tmp_path: Path) -> None:
    calm = ("--busy", "0")  # to count runs, nothing need be busy
    good, bad = flaky(2, "help", tmp_path, *calm), flaky(1, "no-such-target", tmp_path, *calm)
    said, _ = good.communicate(timeout=LIMIT)
    assert good.returncode == 0, said
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["run 1 of 2", "run 2 of 2"]
    assert "make help beside 0 busy processes: 0 of 2 runs failed" in lines[2]
    said, _ = bad.communicate(timeout=LIMIT)
    assert bad.returncode == 1 and "1 of 1 runs failed" in said and "no-such-target" in said.splitlines()[0]
    assert [file.name for file in tmp_path.rglob("*.log")] == ["1.log"]  # of the failed run only
    assert flaky(1, "help", tmp_path, *calm).wait(LIMIT) == 0
    kept = json.loads((tmp_path / "help.json").read_text())
    assert [row["said"] for row in kept] == ["passed"] * 3 and all(row["commit"] for row in kept)


def spins(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # make has ended
        return process.cmdline()[1:2] == ["-c"]
    return False


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_its_busy_processes_end_with_it(by: signal.Signals, tmp_path: Path) -> None:
    process = flaky(1000, "help", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run 1 of")
    spinning = [it for it in psutil.Process(process.pid).children() if spins(it)]
    assert len(spinning) == BUSY
    process.send_signal(by)
    process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    until = time.monotonic() + LIMIT
    while any(it.is_running() and it.status() != psutil.STATUS_ZOMBIE for it in spinning):
        assert time.monotonic() < until
        time.sleep(0.05)
