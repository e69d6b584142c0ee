"""Shared by the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peer.swarm.thread import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """A network thread with its event loop."""
    it = LoopThread()
    yield it
    it.close()
