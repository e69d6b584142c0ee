"""Ports for programs that are told theirs before they take it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count, islice

FIRST, EACH, WORKERS = 20_000, 500, 25  # up to 32,499: from 32,768 on the system draws ports for all that ask for any
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = count(37 * os.getpid())  # a second run of the tests on this machine begins elsewhere


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has. It is given to no other worker, and to this one not soon again."""
    for number in islice(_numbers, EACH):
        port = FIRST + EACH * (WORKER % WORKERS) + number % EACH
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")
