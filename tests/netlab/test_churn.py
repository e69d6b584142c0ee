"""A short form of tests/benchmarks/churn.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.support.harness import TINY
from tests.swarm.support.soak import GROWTH, soak

pytestmark = pytest.mark.needs("laboratory")
OVERLAPPED = ("run.inner_steps=40", "run.exchange.overlap=true", "run.exchange.codec=int8", "run.exchange.stall=4")


def test_killed_frozen_and_disconnected_peers_recover_and_no_merge_is_wrong(tmp_path: Path) -> None:
    found = soak(tmp_path, peers=5, seconds=60, pause=3, seed=1, sets=(*TINY, *OVERLAPPED))
    assert found["faults"] >= 8, found
    assert found["hangs"] == 0, found
    assert found["merged_share"] > 0.2, found
    assert found["parts"] > found["outcomes"]["merged"] / 2, found
    assert found["wrong_parts"] == [], found
    assert found["lost_too_many"] == [], found
    assert found["processes_left"] == 0, found
    assert found["memory_growth"] < GROWTH, found
    assert found["last_loss"] < found["first_loss"] - 1, found
