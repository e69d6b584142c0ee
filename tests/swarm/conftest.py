"""One swarm per test; its processes are always ended, by id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.support.harness import Swarm


@pytest.fixture
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swarm]:
    it = Swarm(tmp_path, cold="cold" in request.keywords)
    try:
        yield it
    finally:
        it.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "swarm" in item.path.parts:
            item.add_marker(pytest.mark.swarm)
