"""How the elements of a contribution become bytes, part by part, and bytes elements again.

``none`` is fp32. ``fp16`` and ``bf16`` round each element. ``int8`` and ``int4`` are in modulo.py: they send an element
modulo a range that two peers are never apart, and the receiver's own contribution tells the rest.
Previous station: average.py. Next station: pair/, which sends the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from peer.config.schema import CodecName
from peer.rounds.contribution import Contribution
from peer.rounds.vectors import PART, parts, scratch

Buffer = bytearray | memoryview
BLOCK = 256  # elements with one range
BLOCK_BYTES = 3  # the range as bf16, and a check


def payload_bytes(name: CodecName, numel: int) -> int:
    """Bytes of all parts of a contribution, digests left out."""
    whole, rest = divmod(numel, PART)
    return whole * size(name, PART) + size(name, rest)


class Codec(ABC):
    """One per peer and run, because some learn from round to round. One part at a time, from any thread.

    A part is 1-D fp32 on the host and begins at element ``start`` of the contribution, a multiple of ``BLOCK``.
    """

    @property
    @abstractmethod
    def sends(self) -> CodecName:
        """What the next parts are coded as; not always what was configured."""

    @abstractmethod
    def encode(self, start: int, part: Tensor) -> bytes:
        """Exactly ``size(sends, len(part))`` bytes."""

    @abstractmethod
    def decode(self, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> None:
        """``out`` ← the partner's elements from its ``data``, coded as ``name``; ``own`` is this peer's same part."""

    def understands(self, name: CodecName) -> bool:
        """Can this peer decode what is coded as ``name``?"""
        return name == self.sends

    # -- of a codec that learns

    def begin(self) -> bool:
        """A round begins. ``True``: :meth:`learn` must tell what this peer has trained, before a part is encoded."""
        return False

    def learn(self, start: int, change: Tensor) -> None:  # noqa: B027
        """What the inner steps since the last average have done to a part's elements. fp32."""

    @property
    def expects(self) -> float:
        """How far off this peer expects its partner's elements to be; 0 when that does not matter."""
        return 0.0

    def meet(self, expects: float) -> None:  # noqa: B027
        """The partner is known, and what it expects; before any part is encoded."""

    def settle(self, merged: bool) -> None:  # noqa: B027
        """A round ends: what was decoded is the partner's for certain, or nothing was used in this round."""


def prepare(codec: Codec, own: Contribution) -> None:
    """A round begins in which all of ``own`` is sent."""
    if not codec.begin():
        return
    room, change = scratch(own.numel), scratch(own.numel)
    for start, stop in parts(own.numel):
        own.read_both(start, room[: stop - start], change[: stop - start])
        codec.learn(start, change[: stop - start])


def size(name: CodecName, numel: int) -> int:
    """Bytes of one part of ``numel`` elements."""
    blocks = -(-numel // BLOCK)
    match name:
        case "none":
            return 4 * numel
        case "fp16" | "bf16":
            return 2 * numel
        case "int8":
            return blocks * (BLOCK + BLOCK_BYTES)
        case "int4":
            return blocks * (BLOCK // 2 + BLOCK_BYTES)


DTYPES: dict[CodecName, torch.dtype] = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(Codec):
    """Elements rounded to a floating point type. Needs to know nothing, and so learns nothing."""

    def __init__(self, name: CodecName) -> None:
        self._name = name

    @property
    def sends(self) -> CodecName:
        return self._name

    def encode(self, start: int, part: Tensor) -> bytes:
        return cast(self._name, part)

    def decode(self, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> None:
        uncast(name, data, out)


def cast(name: CodecName, part: Tensor) -> bytes:
    """``part`` in the floating point type ``name``, little endian. A copy: the transport may keep it."""
    return part.to(DTYPES[name]).view(torch.uint8).numpy().tobytes()


def uncast(name: CodecName, data: Buffer, out: Tensor) -> None:
    """``out`` ← what :func:`cast` has made."""
    out.copy_(torch.frombuffer(data, dtype=DTYPES[name]))
