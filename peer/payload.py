"""Raw tensors on a stream: 1 MiB parts and, behind them, their digest. What it is for, the caller says before.

The link is authenticated and encrypted already; the digest is there against truncation and half-filled buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

from peer.rounds import Contribution
from peer.streams import Stream

PART = 256 * 1024  # elements of fp32: 1 MiB, the size at which the p2p daemon is fastest
DIGEST_BYTES = 16


def parts(numel: int) -> Iterator[tuple[int, int]]:
    """Borders ``(start, stop)`` of the parts of a vector of ``numel`` elements."""
    return ((start, min(start + PART, numel)) for start in range(0, numel, PART))


def scratch(numel: int) -> Tensor:
    """Room for one part, fp32 on the host."""
    return torch.empty(min(PART, numel), dtype=torch.float32)


async def send_payload(stream: Stream, contribution: Contribution, stall: float) -> None:
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


class Vector:
    """A tensor that exists already, as a contribution. 1-D fp32 on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.numel = tensor.numel()

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self._tensor[start : start + out.numel()])
