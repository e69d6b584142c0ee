"""How a group's contributions and means become bytes: 32, 16 or few bits an element (``run.exchange.codec``).

With b bits the elements of a block of 256 are whole multiples of a step, from 1 − 2^(b−1) to 2^(b−1) − 1; the step is
the largest of them over 2^(b−1) − 1, as bf16. With 2 bits that would leave next to nothing of most elements: they are
−1½, −½, ½ or 1½ steps, and the step is the one with the least error (Lloyd, 1982): less than the block's norm, a third
of it for normal elements. Later rounds send what is lost (feedback.py).

Unlike those of a pair (modulo.py) the bytes mean the same to every member, so that all have the same mean to the bit. A
member rounds what it sends, who averages a slice rounds the mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from peer import clock
from peer.config.schema import CodecName
from peer.exchange.codec import BITS, BLOCK, Buffer, Cast
from peer.p2p.payload import Channel, fp32_parts, receive_fp32, receive_parts
from peer.rounds.contribution import Readable, host_vector, parts, scratch

LLOYD = 3  # times that two bits choose their codes by the step, and the step by the codes
STEP_BYTES = 2  # of a block: its step as bf16
# Rounding a mean may lose so much, as a share of the contributions' mean norm; shown.py (``_no_mean``) refuses more.
# fp16 has steps of 6e-8 for what is small: enough for a contribution whose elements are 4e-7 (rms) or more
MOST_LOST: dict[CodecName, float] = {"none": 0.0, "fp16": 0.05, "bf16": 0.01, "int8": 0.05, "int4": 0.5, "int2": 1.0}


class Rounding:
    """``name``: one of :data:`MOST_LOST`. It has no state: any thread may use it. Parts are 1-D fp32 on the host."""

    def __init__(self, name: CodecName) -> None:
        self._name: CodecName = name
        self.most_lost = MOST_LOST[name]  # ‖rounding error of a mean‖ over the mean norm of the contributions
        self._bits = BITS.get(name, 0)
        self._most = 2.0 ** (self._bits - 1) - 1  # a block's largest element, in steps
        self._cast = Cast(name)

    @property
    def exact(self) -> bool:
        """Nothing is rounded."""
        return self._name == "none"

    def size(self, numel: int) -> int:
        """Bytes of ``numel`` elements, without digests."""
        if not self._bits:
            return (4 if self.exact else 2) * numel
        return -(-numel // BLOCK) * (STEP_BYTES + BLOCK * self._bits // 8)

    def encode(self, part: Tensor) -> bytes:
        """``size(len(part))`` bytes. Elements that are not finite stay so."""
        if not self._bits:
            return self._cast.encode(0, part)
        blocks = functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        if self._bits == 2:
            codes, step = _quarters(blocks, len(part))
        else:
            step = blocks.abs().amax(1).div_(self._most).bfloat16()
            codes = blocks.div(step.float()[:, None]).nan_to_num_(0.0).round_().clamp_(-self._most, self._most)
        codes, each, mask = codes.to(torch.int8).view(torch.uint8), 8 // self._bits, 2**self._bits - 1
        packed = codes[:, 0::each] & mask
        for place in range(1, each):
            packed |= (codes[:, place::each] & mask) << self._bits * place
        return torch.cat([step[:, None].view(torch.uint8), packed], dim=1).numpy().tobytes()

    def decode(self, data: Buffer, out: Tensor) -> None:
        """``out`` ← the elements: exact products, so the same bits everywhere."""
        if not len(out):
            return
        if not self._bits:
            self._cast.decode(self._name, 0, data, out, out)
            return
        rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, self.size(BLOCK))
        step = rows[:, :STEP_BYTES].flatten().view(torch.bfloat16).float()[:, None]
        packed = rows[:, STEP_BYTES:].view(torch.int8)
        codes = torch.stack([packed << shift for shift in range(8 - self._bits, -1, -self._bits)], dim=2).flatten(1)
        codes = (codes >> 8 - self._bits).float()  # the sign is the highest bit
        out.copy_((codes.add_(0.5) if self._bits == 2 else codes).mul_(step).view(-1)[: len(out)])

    def apply(self, vector: Tensor) -> list[bytes]:
        """``vector`` ← what arrives of it, in place, of any length; returns the bytes that bring it, part by part."""
        if self.exact:
            return []
        sent = [self.encode(vector[start:stop]) for start, stop in parts(len(vector))]
        for (start, stop), data in zip(parts(len(vector)), sent, strict=True):
            self.decode(bytearray(data), vector[start:stop])
        return sent


def _quarters(blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The codes of two bits, −2 to 1, and the steps. Of the ``numel`` elements; the last block may be padded."""
    counts = host_vector(len(blocks)).fill_(BLOCK)
    counts[-1:] -= len(blocks) * BLOCK - numel
    step = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).div_(counts.sqrt_()).float()
    for _ in range(LLOYD):
        codes = blocks.div(step[:, None]).nan_to_num_(0.0).floor_().clamp_(-2, 1)
        levels = codes + 0.5
        levels.view(-1)[numel:] = 0
        step = (blocks * levels).sum(1).div_(levels.square().sum(1).clamp_(min=1e-3))
    return codes, step.bfloat16()


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
