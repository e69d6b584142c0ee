"""Connections to the ports for direct transfers, by somebody who belongs to none."""

from __future__ import annotations

import asyncio
import contextlib
import os

from peer.p2p.bulk.transfer import ID_BYTES
from tests.benchmarks.siege.streams import Tally

ABREAST = 64  # connections to one port
PATIENCE = 10.0  # seconds until one that nobody closes is given up


async def half_open(port: int, tally: Tally) -> None:
    """Every second one says nothing, the others name a transfer that is none. ``taken``: they were answered."""
    await asyncio.gather(*(_one(port, b"" if number % 2 else os.urandom(ID_BYTES), tally) for number in range(ABREAST)))


async def _one(port: int, said: bytes, tally: Tally) -> None:
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(said)
                answer = await reader.read(1)
            finally:
                writer.close()
    tally.count(bool(answer))
