"""200 seeds: no promise is broken in any of them. Replay one with ``python -m tests.simulated --seed N``."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEEDS, CHUNK = 200, 20
# seeds that have found a defect, as long as seeds were then; those of groups with --kind group
BROKEN = (145, 243, 441, 500, 739, 824, 1027, 1332, 1478, 1513, 1661, 1707, 1879, 2028, 2160, 2348, 3178, 3292, 3989)
BROKEN += (4251, 4305, 4463, 4865, 4893, 5427)
BROKEN_SHORT = (270,)  # since seeds are shorter
BROKEN_GROUPS = (10, 1022, 1094, 1134, 1306, 1345)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_promise_is_broken(first: int) -> None:
    keeps_its_promises("--seed", str(first), "--count", str(CHUNK))


@pytest.mark.parametrize("kind", ["blocking", "overlapped"])
def test_no_promise_is_broken_at_the_end_of_a_run(kind: str) -> None:
    keeps_its_promises("--seed", "0", "--count", "10", "--kind", kind, "--peers", "6", "--ends")


@pytest.mark.long
@pytest.mark.parametrize("seed", BROKEN)
def test_no_promise_is_broken_again(seed: int) -> None:
    keeps_its_promises("--seed", str(seed), "--long")


@pytest.mark.parametrize("seed", BROKEN_SHORT)
def test_no_promise_is_broken_again_in_a_short_world(seed: int) -> None:
    keeps_its_promises("--seed", str(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", BROKEN_GROUPS)
def test_no_promise_of_a_group_is_broken_again(seed: int) -> None:
    keeps_its_promises("--seed", str(seed), "--kind", "group", "--long")


def keeps_its_promises(*arguments: str) -> None:
    """Replays these seeds."""
    command = [sys.executable, "-m", "tests.simulated", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_one_seed_is_one_trace() -> None:
    command = [sys.executable, "-m", "tests.simulated", "--log", "--seed", "7", "--peers", "5"]
    traces = [subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout for _ in range(2)]
    lines = [[line for line in trace.splitlines() if not line.startswith("seed ")] for trace in traces]
    assert lines[0] == lines[1] and len(lines[0]) > 100
