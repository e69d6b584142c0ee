"""Raw tensors on a stream: 1 MiB parts and, behind them, their digest. What it is for, the caller says before.

The link is authenticated and encrypted already; the digest is there against truncation and half-filled buffers.
"""

from __future__ import annotations

import xxhash
from torch import Tensor

from peer.rounds import Readable
from peer.streams import Stream
from peer.vectors import parts, scratch

DIGEST_BYTES = 16


async def send_payload(stream: Stream, contribution: Readable, stall: float) -> None:
    """Send all parts and their digest; ``stall`` seconds without progress raise ``TimeoutError``."""
    digest = xxhash.xxh3_128()
    room = scratch(contribution.numel)
    for start, stop in parts(contribution.numel):
        part = room[: stop - start]
        contribution.read(start, part)
        data = part.numpy().tobytes()  # a copy: the transport may keep a reference past the next part
        digest.update(data)
        await stream.write(data, stall)
    await stream.write(digest.digest(), stall)


async def receive_payload(stream: Stream, out: Tensor, stall: float) -> bool:
    """Fill ``out`` (flat fp32, host); ``True`` when it matches the sender's digest."""
    view = memoryview(out.numpy().data).cast("B")
    digest = xxhash.xxh3_128()
    for start, stop in parts(out.numel()):
        piece = view[4 * start : 4 * stop]
        await stream.read_into(piece, stall)
        digest.update(piece)
    sent = bytearray(DIGEST_BYTES)
    await stream.read_into(memoryview(sent), stall)
    return bytes(sent) == digest.digest()
