"""Shared by the unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from peer.logs import LOGGER
from peer.p2p.event_loop import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """A network thread with its event loop."""
    it = LoopThread()
    yield it
    it.close()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A command sets up its log, by which the next test would look into that one's."""
    logger = logging.getLogger(LOGGER)
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])
