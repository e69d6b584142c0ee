"""The tiers of the tests: every test is in one of them, and what CI must not skip fails there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.project import test_rules as rules

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
REAL = ("netlab", "swarm")
KINDS = {
    "a demo swarm": "swarm/commands/test_demo_swarm.py",
    "overlapped": "swarm/exchange/test_overlap.py",
    "a group": "swarm/exchange/test_group_swarm.py",
    "kill and resume": "swarm/membership/test_resume.py",
    "a late join, by an address alone": "swarm/membership/test_join_command.py",
    "an invitation": "swarm/membership/test_admission.py",
    "NAT": "netlab/test_nat.py",
    "an own loop": "swarm/commands/test_own_loop.py",
    "the page in a browser": "swarm/bootstrap/test_page.py",
    "Prometheus": "swarm/bootstrap/test_prometheus.py",
}


def pytest_of(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "CI"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def test_make_test_has_one_of_each_kind() -> None:
    texts = {file: file.read_text(encoding="utf-8") for part in REAL for file in (TESTS / part).rglob("test_*.py")}
    marked = [str(file.relative_to(TESTS)) for file, text in texts.items() for _ in range(text.count("mark.smoke"))]
    assert sorted(marked) == sorted(KINDS.values())


def test_torch_has_one_thread_in_each_test_process() -> None:
    """That must be said before a test module loads torch. Two processes of two threads took a minute longer."""
    program = "import os, sys; import tests.conftest; print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]


def test_all_others_with_real_processes_are_long() -> None:
    for tier, count in (("smoke", 1), ("long", 6), ("not smoke and not long", 0)):
        done = pytest_of("--collect-only", "-m", tier, "tests/netlab/test_nat.py")
        assert done.stdout.count("::test_") == count, done.stdout


def test_a_missing_program_is_a_skip_and_in_ci_a_failure(tmp_path: Path) -> None:
    file = "tests/swarm/bootstrap/test_page.py"
    alone = pytest_of(file, PATH=str(tmp_path))
    assert alone.returncode == 0 and "skipped" in alone.stdout and "apt-get install" in alone.stdout, alone.stdout
    in_ci = pytest_of(file, PATH=str(tmp_path), CI="true")
    assert in_ci.returncode == 1 and " passed" not in in_ci.stdout, in_ci.stdout
    assert "CI must not skip it: no " in in_ci.stdout and "skipped" not in in_ci.stdout


def test_the_rules_need_promtool() -> None:
    assert rules.pytestmark == pytest.mark.needs("promtool")
