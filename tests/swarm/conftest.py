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
