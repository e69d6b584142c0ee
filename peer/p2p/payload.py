"""Parts on a stream: the bytes of each part and, after them, their xxh3-128 digest. The only format for bulk data.

Pairs, groups and state transfer use it; they define what the bytes mean and when they may be used. The link is
authenticated and encrypted already; the digest finds truncation and half-filled buffers. Under a limit a part goes in
pieces, each at its turn (bandwidth.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

import xxhash
from torch import Tensor

from peer.p2p.bandwidth import Bandwidth
from peer.p2p.stream import BadMessage
from peer.rounds.contribution import Readable, as_bytes, parts, scratch
from peer.rounds.transfer_rule import answer_limit

DIGEST_BYTES = 16


class PartConnections(Protocol):
    """Connections of their own for parts (bulk/transfer.py), in the same format."""

    async def send(self, data: AsyncIterator[bytes], stall: float) -> None: ...

    def receive(self, rooms: Iterable[memoryview], stall: float) -> AsyncIterator[tuple[int, memoryview, bytes]]: ...


class Channel(Protocol):
    """What parts need of a stream."""

    @property
    def bandwidth(self) -> Bandwidth: ...

    @property
    def direct(self) -> PartConnections | None: ...

    async def write(self, data: bytes, timeout: float) -> None: ...

    async def read_into(self, out: memoryview, timeout: float) -> None: ...


class CorruptPart(BadMessage):
    """A part does not match its digest."""


async def send_parts(stream: Channel, data: AsyncIterator[bytes], stall: float) -> None:
    """Send each part and its digest. ``TimeoutError`` after ``stall`` seconds without progress, and more where the
    buffers are full: of a slow reader one sees now and then that it has read another half a megabyte.

    The transport may keep a reference to a part after the next one was asked for.
    """
    if stream.direct is not None:
        await stream.direct.send(data, stall)
        return
    sent, line = 0, stream.bandwidth.up
    async for part in data:
        for piece in line.pieces(part):
            await line.take(len(piece))
            sent += len(piece)
            await stream.write(piece, answer_limit(stall, sent))
        await stream.write(xxhash.xxh3_128_digest(part), answer_limit(stall, sent))


async def receive_parts(
    stream: Channel, rooms: Iterable[memoryview], stall: float
) -> AsyncIterator[tuple[int, memoryview, bytes]]:
    """Fill each of ``rooms`` (bytes) with a part, and yield its number, the room and the digest once they match.

    Rooms may be the same memory: each is filled when the caller asks for its part.
    Raises :class:`CorruptPart`, ``TimeoutError`` after ``stall`` seconds of waiting for a byte, and what the stream
    raises.
    """
    if stream.direct is not None:
        async for part in stream.direct.receive(rooms, stall):
            yield part
        return
    sent, line = bytearray(DIGEST_BYTES), stream.bandwidth.down
    for number, room in enumerate(rooms):
        for piece in line.pieces(room):
            await line.take(len(piece))
            await stream.read_into(piece, stall)
        await stream.read_into(memoryview(sent), stall)
        digest = xxhash.xxh3_128_digest(room)
        if digest != sent:
            raise CorruptPart(f"part {number} does not match its digest")
        yield number, room, digest


async def fp32_parts(vector: Readable, first: int = 0) -> AsyncIterator[bytes]:
    """The parts of a vector as fp32, from number ``first`` on."""
    room = scratch(vector.numel)
    for start, stop in parts(vector.numel)[first:]:
        part = room[: stop - start]
        vector.read(start, part)
        yield part.numpy().tobytes()  # a copy: the transport may keep a reference


async def receive_fp32(stream: Channel, out: Tensor, stall: float) -> None:
    """Fill ``out`` (flat fp32, host) with the parts of :func:`fp32_parts`; ``out`` is invalid when this raises."""
    async for _ in receive_parts(stream, fp32_rooms(out), stall):
        pass


def fp32_rooms(out: Tensor) -> Iterator[memoryview]:
    """The places in ``out`` (flat fp32, host) of the parts of :func:`fp32_parts`."""
    return (as_bytes(out[start:stop]) for start, stop in parts(out.numel()))
