"""Shared by the tests of the project's files."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    """Python 3.11 fails to parse ("AST constructor recursion depth mismatch") when the garbage of another test is
    finalized meanwhile and that formats a traceback, for which it parses too.
    """
    gc.disable()
    yield
    gc.enable()
