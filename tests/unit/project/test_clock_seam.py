"""What runs in virtual time takes the clock and threads from peer/clock.py only: else a simulation is not one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PEER = Path(__file__).parents[3] / "peer"
SIMULATED = ("exchange", "outer", "p2p", "rounds", "swarm", "telemetry", "training")
DAEMON = PEER / "p2p" / "daemon.py"  # a real program, which the simulation replaces
PREPARES = "p2p/event_loop.py: from threading import Lock, Thread"  # what a thread of a real loop does first
OWN = re.compile(
    r"\btime\.(monotonic|time|sleep|perf_counter)\b|\bthreading\.(Thread|Event|Condition|Timer)\b|\bThreadPool|\bto_thread|run_in_executor"
    r"|\bfrom time import .*|\bfrom threading import .*\b(Thread|Event|Condition|Timer)\b.*"
)


def test_nothing_else_takes_them() -> None:
    files = [file for package in SIMULATED for file in (PEER / package).rglob("*.py") if file != DAEMON]
    assert len(files) > 60
    found = [f"{file.relative_to(PEER)}: {it[0]}" for file in files for it in OWN.finditer(file.read_text())]
    assert found == [PREPARES]


@pytest.mark.parametrize(
    "line",
    [
        *("began = time.monotonic()", "threading.Thread(target=it)", "asyncio.to_thread(it)"),
        *("from time import monotonic", "from threading import Lock, Thread"),
    ],
)
def test_the_pattern_finds_them(line: str) -> None:
    assert OWN.search(line)
