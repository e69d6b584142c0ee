"""The short form of ``python -m tests.fuzz``: valid inputs with bytes changed, deleted and inserted."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.targets import BYTES, SECONDS, targets

INPUTS = 300
BUSY = 10  # tracemalloc makes everything slower


def changed(example: bytes, chance: random.Random) -> bytes:
    data = bytearray(example)
    for _ in range(chance.randint(0, 6)):
        place = chance.randint(0, len(data))
        kind = chance.randrange(4)
        if kind == 0 and data:
            data[place % len(data)] = chance.randrange(256)
        elif kind == 1:
            data[place:place] = chance.choice([b"\0", b"\xff" * 4, b"NaN", b"-1e999", b'"', b"{}", b"[" * 50])
        elif kind == 2:
            del data[place : place + chance.randint(1, 20)]
        else:
            data[place:place] = data[chance.randint(0, len(data)) :][:40]
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_read_without_harm(name: str) -> None:
    target, chance = targets()[name], random.Random(name)
    tracemalloc.start()
    try:
        for example in target.examples:
            for _ in range(INPUTS // len(target.examples)):
                began = time.thread_time()
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                target.read(changed(example, chance))
                assert tracemalloc.get_traced_memory()[1] - before < BYTES
                assert time.thread_time() - began < BUSY * SECONDS
    finally:
        tracemalloc.stop()
