"""Raw tensors on a stream: 1 MiB parts and, behind all or behind each of them, a digest. What for, the caller says.

The link is authenticated and encrypted already; the digest is there against truncation and half-filled buffers.
"""

from __future__ import annotations

from typing import Protocol

import xxhash
from torch import Tensor

from peer.p2p.stream import Stream
from peer.rounds.contribution import Readable
from peer.rounds.vectors import parts, scratch

DIGEST_BYTES = 16


class Channel(Protocol):
    """What a payload needs of a stream."""

    async def write(self, data: bytes, timeout: float) -> None: ...

    async def read_into(self, out: memoryview, timeout: float) -> None: ...


async def send_payload(stream: Channel, contribution: Readable, stall: float) -> None:
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


async def receive_payload(stream: Channel, out: Tensor, stall: float) -> bool:
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


async def send_parts(stream: Stream, contribution: Readable, first: int, stall: float) -> None:
    """Send the parts from number ``first`` on, each with its digest behind it."""
    room = scratch(contribution.numel)
    for start, stop in list(parts(contribution.numel))[first:]:
        part = room[: stop - start]
        contribution.read(start, part)
        data = part.numpy().tobytes()
        await stream.write(data + xxhash.xxh3_128_digest(data), stall)


async def receive_part(stream: Stream, out: Tensor, stall: float) -> bool:
    """Fill ``out`` (flat fp32, host) with one part; ``True`` when it matches its digest."""
    view = memoryview(out.numpy().data).cast("B")
    sent = bytearray(DIGEST_BYTES)
    await stream.read_into(view, stall)
    await stream.read_into(memoryview(sent), stall)
    return bytes(sent) == xxhash.xxh3_128_digest(view)
