"""How a group's contributions and means become bytes: fp32, bf16, or few bits an element (``run.exchange.codec``).

With b bits the elements of a block of 256 are whole multiples of a step, from 1 − 2^(b−1) to 2^(b−1) − 1; the step is
the largest of them over 2^(b−1) − 1, as bf16. Unlike those of a pair (modulo.py) the bytes mean the same to every
member, so that all have the same mean to the bit. A member rounds what it sends, who averages a slice rounds the mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from peer import clock
from peer.config.schema import CodecName
from peer.exchange.average import copy_own
from peer.exchange.codec import BLOCK, Buffer, Cast
from peer.p2p.payload import Channel, fp32_parts, receive_fp32, receive_parts
from peer.rounds.contribution import Readable, parts, scratch

STEP_BYTES = 2  # of a block: its step as bf16
MOST_LOST: dict[CodecName, float] = {"none": 0.0, "bf16": 0.01, "int8": 0.05, "int4": 0.5}  # see objection in sketch.py


class Rounding:
    """``name``: one of :data:`MOST_LOST`. It has no state: any thread may use it. Parts are 1-D fp32 on the host."""

    def __init__(self, name: CodecName) -> None:
        self._name: CodecName = name
        self.most_lost = MOST_LOST[name]  # ‖rounding error of a mean‖ over the mean norm of the contributions
        self._most = {"int8": 127.0, "int4": 7.0}.get(name, 0.0)  # a block's largest element, in steps
        self._cast = Cast(name)

    @property
    def exact(self) -> bool:
        """Nothing is rounded."""
        return self._name == "none"

    def size(self, numel: int) -> int:
        """Bytes of ``numel`` elements, without digests."""
        if not self._most:
            return (4 if self.exact else 2) * numel
        return -(-numel // BLOCK) * (STEP_BYTES + (BLOCK if self._name == "int8" else BLOCK // 2))

    def encode(self, part: Tensor) -> bytes:
        """``size(len(part))`` bytes. Elements that are not finite stay so."""
        if not self._most:
            return self._cast.encode(0, part)
        blocks = functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        step = blocks.abs().amax(1).div_(self._most).bfloat16()
        wide = step.float()[:, None]
        codes = blocks.div(wide).nan_to_num_(0.0).round_().clamp_(-self._most, self._most).to(torch.int8)
        if self._name == "int4":
            codes = (codes[:, 0::2] & 15) | codes[:, 1::2] << 4
        return torch.cat([step[:, None].view(torch.uint8), codes.view(torch.uint8)], dim=1).numpy().tobytes()

    def decode(self, data: Buffer, out: Tensor) -> None:
        """``out`` ← the elements: exact products, so the same bits everywhere."""
        if not len(out):
            return
        if not self._most:
            self._cast.decode(self._name, 0, data, out, out)
            return
        rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, self.size(BLOCK))
        step = rows[:, :STEP_BYTES].flatten().view(torch.bfloat16).float()[:, None]
        codes = rows[:, STEP_BYTES:].view(torch.int8)
        if self._name == "int4":
            codes = torch.stack([codes << 4 >> 4, codes >> 4], dim=2).flatten(1)
        out.copy_(codes.float().mul_(step).view(-1)[: len(out)])

    def apply(self, vector: Tensor) -> None:
        """``vector`` ← what arrives of it, in place. Of any length."""
        if self.exact:
            return
        for start, stop in parts(len(vector)):
            self.decode(bytearray(self.encode(vector[start:stop])), vector[start:stop])


class Slice:
    """Elements ``start : stop`` of a contribution."""

    def __init__(self, whole: Readable, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.numel = stop - start

    def read(self, start: int, out: Tensor) -> None:
        self._whole.read(self._start + start, out)


class Rounded:
    """A vector as it arrives. What is read are whole blocks from the start of one, or all that is left."""

    def __init__(self, vector: Readable, rounding: Rounding) -> None:
        self._vector, self._rounding = vector, rounding
        self.numel = vector.numel

    def read(self, start: int, out: Tensor) -> None:
        self._vector.read(start, out)
        self._rounding.apply(out)


def borders(numel: int, members: int) -> list[tuple[int, int]]:
    """Of the slice of each member."""
    return list(pairwise(numel * place // members for place in range(members + 1)))


def mean_of_slices(group: Sequence[Readable], rounding: Rounding, out: Tensor) -> None:
    """``out`` ← the mean that a group's all-reduce gives, bit for bit where nothing is clipped."""
    for start, stop in borders(out.numel(), len(group)):
        total, room = out[start:stop].zero_(), torch.empty(stop - start)
        for contribution in group:
            copy_own(Rounded(Slice(contribution, start, stop), rounding), room)
            total.add_(room)
        rounding.apply(total.mul_(1 / len(group)))


async def encoded(rounding: Rounding, vector: Readable) -> AsyncIterator[bytes]:
    """The parts of a payload."""
    if rounding.exact:
        async for data in fp32_parts(vector):
            yield data
        return
    for start, stop in parts(vector.numel):
        part = scratch(vector.numel)[: stop - start]
        vector.read(start, part)
        yield await clock.in_thread(rounding.encode, part)


async def receive(stream: Channel, rounding: Rounding, out: Tensor, stall: float) -> None:
    """Fill ``out`` (flat fp32, host) with a payload; it is invalid when this raises, as :func:`receive_parts` does."""
    if rounding.exact:
        await receive_fp32(stream, out, stall)
        return
    places = parts(out.numel())
    rooms: Iterable[memoryview] = (memoryview(bytearray(rounding.size(stop - start))) for start, stop in places)
    async for number, data, _ in receive_parts(stream, rooms, stall):
        start, stop = places[number]
        await clock.in_thread(rounding.decode, data, out[start:stop])
