"""How the elements of a contribution become bytes, part by part, and bytes become elements.

``none`` is fp32. ``fp16`` and ``bf16`` round each element. ``int8`` and ``int4`` (modulo.py) send an element modulo a
range that is larger than the distance of two peers; the receiver's own element gives the rest. A sparse contribution
has a format of its own, :func:`pack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from peer.config.schema import CodecName
from peer.rounds.contribution import Contribution, SparseContribution, parts, scratch

Buffer = bytearray | memoryview
BLOCK = 256  # elements with one range
BITS: dict[CodecName, int] = {"int8": 8, "int4": 4, "int2": 2}  # of an element
BLOCK_BYTES = 5  # the range as bf16, and a check
COEFFICIENT_BYTES = 4  # 16 bits of position in its chunk, an fp16 value


class Codec(ABC):
    """One per peer and run, because some learn from round to round. One part at a time, from any thread.

    A part is 1-D fp32 on the host. It begins at element ``start`` of the contribution, a multiple of ``BLOCK``.
    """

    learns: ClassVar[bool] = False  # from contributions: begin() may ask for them
    sends: CodecName  # the codec of the next parts; not always the configured one
    understands: tuple[CodecName, ...]  # the codecs that this peer can decode

    @abstractmethod
    def encode(self, start: int, part: Tensor) -> bytes:
        """Exactly ``size(sends, len(part))`` bytes."""

    @abstractmethod
    def decode(self, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> int:
        """``out`` ← the partner's elements from its ``data``, coded as ``name``; ``own``: this peer's own part.

        Returns how many blocks could not be resolved; ``out`` is ``own`` there. What no honest peer sends becomes NaN.
        """

    def encode_changed(self, start: int, part: Tensor, change: Tensor) -> bytes:
        """:meth:`encode` after :meth:`learn`."""
        self.learn(start, change)
        return self.encode(start, part)

    # -- for a codec that learns

    def begin(self) -> bool:
        """A round begins. ``True``: each part needs :meth:`learn` before any is encoded or decoded."""
        return False

    def learn(self, start: int, change: Tensor) -> None:  # noqa: B027
        """``change``: of a part's elements by the inner steps since the last average, fp32."""

    @property
    def expects(self) -> float:
        """The distance that this peer expects between two elements; 0 when it does not matter."""
        return 0.0

    def meet(self, expects: float) -> None:  # noqa: B027
        """The partner's :attr:`expects` has come; before any part is encoded."""

    def end_round(self, merged: bool, *, whole: bool = False) -> None:  # noqa: B027
        """A round ends. ``merged``: the partner's parts are verified and used. ``whole``: they are verified."""


def prepare(codec: Codec, own: Contribution) -> None:
    """A round begins that sends all of ``own``."""
    if not codec.begin():
        return
    room, change = scratch(own.numel), scratch(own.numel)
    for start, stop in parts(own.numel):
        own.read_both(start, room[: stop - start], change[: stop - start])
        codec.learn(start, change[: stop - start])


def size(name: CodecName, numel: int) -> int:
    """Bytes of ``numel`` elements, without digests: of one part, or of all, because the others are whole blocks."""
    blocks = -(-numel // BLOCK)
    match name:
        case "none":
            return 4 * numel
        case "fp16" | "bf16":
            return 2 * numel
        case _:
            return blocks * (BLOCK * BITS[name] // 8 + BLOCK_BYTES)


def wrong_size(name: CodecName, said: int, numel: int) -> str:
    """Why a header that says so many bytes announces no ``numel`` elements; empty when it does."""
    expected = size(name, numel)
    return "" if said == expected else f"payload_bytes is {said} there and {expected} here"


MOST_FP16 = torch.finfo(torch.float16).max  # 65504
DTYPES: dict[CodecName, torch.dtype] = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(Codec):
    """Elements rounded to a floating point type."""

    def __init__(self, name: CodecName) -> None:
        self.sends, self.understands = name, (name,)

    def encode(self, start: int, part: Tensor) -> bytes:
        """Little endian. A copy: the transport may keep it. Finite elements stay finite."""
        cast = part.to(DTYPES[self.sends])
        if self.sends == "fp16":
            cast = torch.where(part.isfinite(), cast.clamp(-MOST_FP16, MOST_FP16), cast)
        return cast.view(torch.uint8).numpy().tobytes()

    def decode(self, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> int:
        out.copy_(torch.frombuffer(data, dtype=DTYPES[name]))
        return 0


def pack(sparse: SparseContribution) -> Tensor:
    """``COEFFICIENT_BYTES`` for each coefficient, as a vector of as many fp32."""
    out = np.empty((sparse.values.numel(), 2), dtype="<u2")
    out[:, 0] = (sparse.positions - sparse.bases).numpy()
    out[:, 1] = sparse.values.half().numpy().view("<u2")
    return torch.from_numpy(out.reshape(-1).view("<f4"))


def unpack(packed: Tensor, like: SparseContribution) -> SparseContribution:
    """The inverse of :func:`pack`; ``like``: this peer's own contribution, which has the same bases."""
    pairs = packed.numpy().view("<u2").reshape(-1, 2)
    positions = torch.from_numpy(pairs[:, 0].astype(np.int64)).add_(like.bases)
    values = torch.from_numpy(pairs[:, 1].copy().view("<f2").astype(np.float32))
    return SparseContribution(like.numel, like.bases, positions, values)
