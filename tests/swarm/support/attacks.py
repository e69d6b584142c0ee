"""False contributions of a hostile member, and a guard that accepts them.

The hostile member trains and merges like every other peer.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from peer.exchange.average import Verdict
from peer.exchange.codec import Cast
from peer.exchange.guard import Guard, Judgement
from peer.rounds.types import Reason


class Attack(StrEnum):
    """An honest peer sends ``s`` = γφ + βΔ."""

    SIGN = "sign"  # γφ − βΔ: reverses its own progress
    SCALE = "scale"  # 3 s: within the norm ratio that the guard allows
    RANDOM = "random"  # noise with the norm of s
    STALE = "stale"  # always the contribution of its first swap
    NAN = "nan"  # a few elements of s are not finite
    HUGE = "huge"  # 100 s


class Hostile(Cast):
    """The codec ``none`` of a hostile peer (:class:`peer.exchange.codec.Codec`)."""

    def __init__(self, attack: Attack) -> None:
        super().__init__("none")
        self._attack = attack
        self._change: dict[int, Tensor] = {}
        self._first: dict[int, bytes] = {}
        self._chance = torch.Generator().manual_seed(0)

    def begin(self) -> bool:
        return True

    def learn(self, start: int, change: Tensor) -> None:
        self._change[start] = change.clone()

    def encode(self, start: int, part: Tensor) -> bytes:
        data = super().encode(start, self._false(part, self._change[start]))
        return self._first.setdefault(start, data) if self._attack is Attack.STALE else data

    def _false(self, s: Tensor, change: Tensor) -> Tensor:
        match self._attack:
            case Attack.SIGN:
                return s - 2 * change
            case Attack.SCALE:
                return 3 * s
            case Attack.RANDOM:
                return torch.randn(len(s), generator=self._chance) * (s.norm() / len(s) ** 0.5)
            case Attack.NAN:
                return torch.where(torch.arange(len(s)) % max(1, len(s) // 3) == 0, torch.nan, s)
            case Attack.HUGE:
                return 100 * s
            case Attack.STALE:
                return s


class Unguarded(Guard):
    """Refuses only contributions that are not finite or whose norm is absurd."""

    def judgement(self, partner: str, numel: int) -> Judgement:
        return _Unguarded(self, partner, numel)


class _Unguarded(Judgement):
    def objection(self, digest: bytes) -> Verdict | None:
        found = super().objection(digest)
        return found if found is not None and found.reason in (Reason.NOT_FINITE, Reason.NORM) else None
