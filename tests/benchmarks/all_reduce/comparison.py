"""Our group all-reduce against hivemind's DecentralizedAverager: seconds per round, and reports when a member dies.

python -m tests.benchmarks.all_reduce [--quick] [--json FILE]

Four processes average vectors with a known mean over loopback. A round is wrong if a member was told that it succeeded,
but its elements are neither all the mean of all members nor all the mean without the killed member. Both form the group
during the inner steps before the boundary.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.benchmarks.all_reduce.member import KILLED
from tests.benchmarks.common import finish, options

MEMBERS = 4
LINE = re.compile(r"round seconds=([\d.]+) said=(\w+) wrong=([\d.]+)")
LIMIT = 150.0  # seconds for one group of processes


def group(kind: str, numel: int, rounds: int, kill_after: float | None) -> list[tuple[float, str, float]]:
    """The rounds of the surviving members. ``kill_after``: seconds after the last member began its first round."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{place}.log" for place in range(MEMBERS)]
        members: list[subprocess.Popen[bytes]] = []
        seen: dict[int, psutil.Process] = {}
        try:
            address = "-"
            for place, log in enumerate(logs):
                words = [kind, address, str(place), str(MEMBERS), str(numel), str(rounds)]
                with log.open("wb") as output:
                    command = [sys.executable, "-m", "tests.benchmarks.all_reduce.member", *words]
                    members.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
                if place == 0:
                    address = wait_for(log, r"address (\S+)")
            if kill_after is not None:
                for log in logs:
                    wait_for(log, "begin")
                time.sleep(kill_after)
                note(members, seen)
                members[KILLED].send_signal(signal.SIGKILL)
            for member in members:
                member.wait(LIMIT)
        finally:
            note(members, seen)
            for process in seen.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        lived = [log for place, log in enumerate(logs) if kill_after is None or place != KILLED]
        return [
            (float(took), said, float(wrong)) for log in lived for took, said, wrong in LINE.findall(log.read_text())
        ]


def note(members: list[subprocess.Popen[bytes]], seen: dict[int, psutil.Process]) -> None:
    """Remember the members and their children; they are ended by id."""
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(member.pid)
            seen.update({process.pid: process for process in (root, *root.children(recursive=True))})


def wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + LIMIT
    while not (found := re.search(pattern, log.read_text() if log.exists() else "")):
        assert time.monotonic() < deadline, f"no {pattern}: {log.read_text()[-500:]}"
        time.sleep(0.005)
    return found.group(found.lastindex or 0)


def measure(kind: str, numel: int, rounds: int, kills: int) -> dict[str, Any]:
    healthy = group(kind, numel, rounds, None)
    seconds = median(row[0] for row in healthy)
    moments = [0.5, 0.6, 0.7, 0.8, 0.9][:kills]  # as a share of a round: the payloads move at its end
    after = [row for moment in moments for row in group(kind, numel, 1, seconds * moment)]
    return {
        "seconds": seconds,
        "rounds": len(healthy),
        "rounds_wrong": sum(said != "merged" or wrong > 0 for _, said, wrong in healthy),
        "killed_rounds": len(after),
        "killed_success": sum(said == "merged" for _, said, _ in after),
        "killed_wrong": sum(said == "merged" and wrong > 0 for _, said, wrong in after),
    }


def main() -> None:
    args = options("our group all-reduce against hivemind's averager")
    numel = (4 if args.quick else 16) * 2**20  # fp32: 16 or 64 MiB
    found = {kind: measure(kind, numel, *((4, 2) if args.quick else (10, 5))) for kind in ("ours", "hivemind")}
    ratio = found["hivemind"]["seconds"] / found["ours"]["seconds"]
    ours, theirs = found["ours"], found["hivemind"]
    words = (
        f"{MEMBERS} members, {numel // 2**18} MiB: hivemind's averager takes {ratio:.1f} times as long from boundary "
        f"to result; with a member killed, {theirs['killed_wrong']} of {theirs['killed_rounds']} rounds of the others "
        f"were reported as a success and were wrong, of ours {ours['killed_wrong']} of {ours['killed_rounds']}"
    )
    goals = {
        "each round of ours is right": ours["rounds_wrong"] == 0,
        "no round of ours with a killed member is wrong": ours["killed_wrong"] == 0,
        "ours takes no longer than hivemind's": ratio >= 1,
    }
    finish("all_reduce", {**found, "seconds_ratio": ratio}, words, args, goals)
