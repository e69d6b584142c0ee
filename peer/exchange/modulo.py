"""Modulo quantisation: few bits an element, by what two peers have in common (Davies et al., arXiv 2002.09268; Lu and
De Sa, "Moniqua", ICML 2020).

Weights quantise badly, because they are large in relation to the change by an outer step. But the contributions of two
peers differ by less than some reach r. With b bits and the step q = 2 r / 2^b the sender rounds x to k q and sends
k mod 2^b. Among all numbers with that remainder the receiver takes the nearest one to its own element. The error is at
most q / 2: it scales with the distance of the two peers and not with the weights.

Each block of 256 elements has its own r: at first three times the largest change of its elements since the last
average, later a margin above the largest distance in the last swap, and above its own last change. Two peers that
differ by more would decode a wrong number, so each block carries a check of three bytes: a weighted sum of its k / 2^b,
rounded down, modulo a prime. A block that does not match is not averaged (the receiver keeps its own elements), is
counted, and has twice the reach in the next round. A step that is not above 0 is no such accident: the block is NaN.

A partner that is further away than a block's reach can be decoded where its own reach is wide. But it cannot decode
what this peer sends. So when most blocks are that far or do not match, the reaches are unknown: the next payload of
this peer is fp16, and its own change counts again. It may have changed nothing before its first swap.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from peer.config.schema import CodecName
from peer.exchange.codec import BLOCK, BLOCK_BYTES, Buffer, Cast, Codec
from peer.logs import fields, get_logger
from peer.rounds.contribution import host_vector

log = get_logger("codec")

FIRST = 3.0  # reach before the first swap, times a block's largest change: momentum will carry peers apart
# the same before a later one: the changes of both count, and grow in a warm-up; a block at rest, such as the embeddings
# of rare tokens, may change at once. With 1.0 up to a fifth of the blocks did not resolve in a fourth round.
LATER = 2.0
MARGIN = 1.5  # reach, times the largest distance of the last swap
SHRINK = 0.75  # a reach shrinks at most to this share in a round: the largest distance of a block is noisy
WIDEN = 1.5  # after a round without a partner (the distance grows), and while peers drift apart
WIDEST = 3.0  # the limit after several rounds alone
GROWN = 2.0  # a reach grows at most to this multiple in a swap: a partner's distance may be false
GROWING = 0.05  # share of blocks that are too far: all peers drift apart faster than before
LOST = 0.5  # share of blocks that are too far: the reach is unknown
EXACT = 2.0**-22  # steps are not finer than this share of a block's largest element: k must be exact in fp32
# A block's reach is at least the mean over this: a partner may have moved what this peer did not. With 4 bits a wider
# one would cost the blocks at rest too much precision.
NARROWEST = {"int8": 2, "int4": 16}
TINY, HUGE = 1e-30, 1e30
PRIME = 2**24 - 3  # of one byte, a check would let one of 251 wrong blocks pass
CHECK_WEIGHTS = torch.from_numpy(np.array([pow(10368889, place, PRIME) for place in range(1, BLOCK + 1)], np.float64))


class Modulo(Codec):
    """:class:`peer.exchange.codec.Codec` for 8 or 4 bits an element."""

    learns: ClassVar[bool] = True

    def __init__(self, name: Literal["int8", "int4"], numel: int) -> None:
        self._name: CodecName = name
        self.sends, self.understands = self._name, (name, "fp16")
        self._exact = Cast("fp16")
        self._levels = 2.0 ** (8 if name == "int8" else 4)
        self._reach = host_vector(-(-numel // BLOCK)).zero_()
        self._seen = torch.zeros_like(self._reach)
        self._known = False
        self._floor = 0.0
        self._wider = 1.0  # for all blocks
        self._partner = 1.0  # for all blocks in this round: a partner that was alone for longer expects more
        self._too_far = 0

    def begin(self) -> bool:
        self._seen.copy_(self._reach)
        self._too_far = 0
        self._floor = float(self._reach.mean()) / NARROWEST[self._name]
        self._partner = 1.0
        return not self._known

    def learn(self, start: int, change: Tensor) -> None:
        blocks = _blocks(change)
        furthest = blocks.abs().amax(1).mul_(LATER if self._known else FIRST)
        reach = self._at(self._reach, start, blocks)
        torch.maximum(reach, furthest.clamp_(max=HUGE), out=reach)

    @property
    def expects(self) -> float:
        return min(float(self._reach.mean()) * self._wider, HUGE)

    def meet(self, expects: float) -> None:
        own = self.expects
        self._partner = min(max(1.0, expects / own), WIDEST) if own else 1.0

    def encode(self, start: int, part: Tensor) -> bytes:
        if self.sends == "fp16":
            return self._exact.encode(start, part)
        blocks = _blocks(part)
        reach = self._range(start, blocks)
        finest = blocks.abs().amax(1).mul_(EXACT).clamp_(min=TINY)
        step = torch.maximum(reach * (2 * MARGIN / self._levels), finest).bfloat16()
        numbers = blocks.div(step.float()[:, None]).round_()
        wraps = numbers.div(self._levels).floor_()
        codes = numbers.sub_(wraps, alpha=self._levels).to(torch.uint8)  # exact, and faster than torch's remainder
        if self._levels == 16:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        scales = step[:, None].view(torch.uint8)
        return torch.cat([scales, _check(wraps), codes], dim=1).numpy().tobytes()

    def decode(self, name: CodecName, start: int, data: Buffer, own: Tensor, out: Tensor) -> int:
        mine = _blocks(own)
        if name == "fp16":
            self._exact.decode(name, start, data, own, out)
            theirs, wrong = _blocks(out), torch.zeros(len(mine), dtype=torch.bool, device="cpu")
        else:
            theirs, wrong = self._resolve(data, mine)
            out.copy_(theirs.view(-1)[: len(out)])
        distance, wider = (theirs - mine).abs_().amax(1), self._range(start, mine).mul_(GROWN / self._partner)
        too_far = wrong | ~(distance <= wider)
        self._at(self._seen, start, mine).copy_(torch.where(too_far, wider, distance))
        self._too_far += int(too_far.sum())
        return int(wrong.sum())

    def _resolve(self, data: Buffer, mine: Tensor) -> tuple[Tensor, Tensor]:
        """The partner's blocks, and which of them do not match; these are ``mine``, or NaN for a false step."""
        rows = torch.frombuffer(data, dtype=torch.uint8).view(len(mine), -1)
        step = rows[:, :2].flatten().view(torch.bfloat16).float()
        possible = step.isfinite() & (step > 0)
        sane = possible & (mine.abs().amax(1) < step / EXACT * 4)
        step = torch.where(sane, step, 1.0)[:, None]
        nearest = mine.div(step).round_()
        codes = rows[:, BLOCK_BYTES:]
        if self._levels == 16:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        remainders = codes.float()
        wraps = torch.sub(remainders, nearest, out=nearest).add_(self._levels / 2).div_(self._levels).floor_().neg_()
        wrong = (_check(wraps) != rows[:, 2:BLOCK_BYTES]).any(1).logical_or_(~sane)
        theirs = remainders.add_(wraps, alpha=self._levels).mul_(step)
        if wrong.any():
            theirs[wrong] = mine[wrong]
            theirs[~possible] = torch.nan
        return theirs, wrong

    def end_round(self, merged: bool, *, whole: bool = False) -> None:
        if merged or whole:
            self._learn_distances()
        if not merged:
            self._wider = min(self._wider * WIDEN, WIDEST)

    def _learn_distances(self) -> None:
        torch.maximum(self._reach.mul_(SHRINK), self._seen.clamp_(max=HUGE), out=self._reach)
        share = self._too_far / len(self._reach)
        self._known = share <= LOST
        self.sends = self._name if self._known else "fp16"
        self._wider = WIDEN if share > GROWING else 1.0
        if self._too_far:
            log.debug("blocks beyond the reach: %s", fields(share=share, next=self.sends))

    def _at(self, blocks: Tensor, start: int, like: Tensor) -> Tensor:
        first = start // BLOCK
        return blocks[first : first + len(like)]

    def _range(self, start: int, like: Tensor) -> Tensor:
        """r of this part's blocks."""
        return self._at(self._reach, start, like).clamp(min=self._floor).mul_(self._wider * self._partner)


def _check(wraps: Tensor) -> Tensor:
    """Of each block, ``[n, 3]``: what the remainders leave out. All sums are exact in fp64."""
    return (wraps.double() @ CHECK_WEIGHTS).remainder_(PRIME).to(torch.int32)[:, None].view(torch.uint8)[:, :3]


def _blocks(part: Tensor) -> Tensor:
    """``[n, BLOCK]``, padded with zeros; the same memory where nothing is to be padded."""
    missing = -len(part) % BLOCK
    return (functional.pad(part, (0, missing)) if missing else part).view(-1, BLOCK)


def codec_named(name: CodecName, numel: int) -> Codec:
    """The codec that ``run.exchange.codec`` names, for ``numel`` elements. The only place that picks its class."""
    return Modulo(name, numel) if name in ("int8", "int4") else Cast(name)
