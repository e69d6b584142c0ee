"""Shared by all tests: which tier a test belongs to, and what it needs of the machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import needs

# Before torch is loaded. Its threads wait for each other: where other tests have the cores, a sum of a million numbers
# takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
settings.register_profile("tests", deadline=None, derandomize=True)  # no luck, and no speed of the machine
settings.load_profile("tests")
logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # else what one test's garbage says is a message of another one
LONG = ("swarm", "netlab", "gpu")  # folders of tests with real processes or that take minutes
FIRST = "tests/simulated/test_seeds.py"  # else the last seeds run alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda it: not it.nodeid.startswith(FIRST))
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in LONG and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs.check(item)
