"""A contribution on a stream: its parts as the codec makes them and, behind them, the digest of all bytes.

Encoding and decoding run beside the network loop, so that a part is coded while others are on their way.
Previous station: codec.py. Next station: pair.py, which puts the pieces in order.
"""

from __future__ import annotations

import asyncio

import xxhash
from torch import Tensor

from peer.exchange.average import blend
from peer.exchange.codec import Codec, size
from peer.exchange.guard import Trial
from peer.exchange.pair.wire import Header
from peer.p2p.payload import DIGEST_BYTES
from peer.p2p.stream import Stream
from peer.rounds.contribution import Contribution
from peer.rounds.vectors import parts, scratch


async def send_coded(stream: Stream, own: Contribution, codec: Codec, stall: float) -> None:
    """Send all parts and their digest; ``stall`` seconds without progress raise ``TimeoutError``."""
    digest = xxhash.xxh3_128()
    room = scratch(own.numel)

    def encode(start: int, stop: int) -> bytes:
        part = room[: stop - start]
        own.read(start, part)
        data = codec.encode(start, part)
        digest.update(data)
        return data

    for start, stop in parts(own.numel):
        await stream.write(await asyncio.to_thread(encode, start, stop), stall)
    await stream.write(digest.digest(), stall)


async def receive_coded(
    stream: Stream,
    own: Contribution,
    codec: Codec,
    header: Header,
    out: Tensor,
    trial: Trial,
    share: float,
    stall: float,
) -> bytes | None:
    """Fill ``out`` (flat fp32, host) with the mean of the partner's contribution and ``own``, ``share`` of it theirs.

    The digest, or ``None`` when what has come does not match it. Nobody may use ``out`` before the trial's verdict.
    """
    name = header.codec
    digest = xxhash.xxh3_128()
    room, room_of_change = scratch(own.numel), scratch(own.numel)

    def decode(start: int, stop: int, data: bytearray) -> None:
        digest.update(data)
        part, change = room[: stop - start], room_of_change[: stop - start]
        own.read_both(start, part, change)
        codec.decode(name, start, data, part, out[start:stop])
        trial.add(part, change, out[start:stop])
        blend(part, out[start:stop], share)

    sent = bytearray(DIGEST_BYTES)
    decoding: asyncio.Future[None] | None = None  # of the part before, while the next one arrives
    try:
        for start, stop in parts(own.numel):
            data = bytearray(size(name, stop - start))
            await stream.read_into(memoryview(data), stall)
            if decoding is not None:
                await decoding
            decoding = asyncio.ensure_future(asyncio.to_thread(decode, start, stop, data))
        await stream.read_into(memoryview(sent), stall)
    finally:
        if decoding is not None:
            await decoding  # whatever has happened: nothing may write to ``out`` behind our back
    return bytes(sent) if bytes(sent) == digest.digest() else None
