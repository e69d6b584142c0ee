"""False contributions of hostile members, and a guard that accepts them.

A hostile member trains and merges like every other peer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from peer.config.schema import CodecName
from peer.exchange.codec import Cast
from peer.exchange.guard import Guard, Judgement
from peer.replica.inner_loop import batch_loss
from peer.rounds.types import Reason, Verdict
from peer.training.state import PeerState

CREEP = "creep"  # a slow poison, by :func:`creeping`
STEPS = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)  # lengths that a slow poison tries, of ‖βΔ‖
UNNOTICED = 1.08  # times its loss: below what rollback.py takes for a jump
Falsehood = Callable[[Tensor, Tensor, int], Tensor]  # of s and βΔ of a part, and its first element: what is sent


class Attack(StrEnum):
    """An honest peer sends ``s`` = γφ + βΔ."""

    SIGN = "sign"  # γφ − βΔ: reverses its own progress
    SCALE = "scale"  # 3 s
    RANDOM = "random"  # noise with the norm of s
    STALE = "stale"  # always the contribution of its first swap
    NAN = "nan"  # a few elements of s are not finite
    HUGE = "huge"  # 100 s
    LOUD = "loud"  # 1.9 s
    NOISY = "noisy"  # 0.4 s + 0.9 noise: it has more in common with s than noise has
    DROWNED = "drowned"  # 0.15 s + noise: just enough in common
    POISON = "poison"  # s + one direction, the same in every round and for every partner


def mixture(own: float, change: float, noise: float) -> Falsehood:
    """``own`` · s + ``change`` · βΔ + ``noise`` of the norm of s."""
    chance = torch.Generator().manual_seed(0)

    def false(s: Tensor, changed: Tensor, start: int) -> Tensor:
        drawn = torch.randn(len(s), generator=chance) * (s.norm() / len(s) ** 0.5)
        return own * s + change * changed + noise * drawn

    return false


def poison(length: float, seed: int = 0) -> Falsehood:
    """s + a constant direction of ``length`` ‖βΔ‖. Those that collude have the same ``seed``."""
    directions: dict[int, Tensor] = {}

    def false(s: Tensor, changed: Tensor, start: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        way = directions.setdefault(len(s), torch.randn(len(s), generator=chance) / len(s) ** 0.5)
        return s + length * changed.norm() * way

    return false


def uphill(gradient: Callable[[], Tensor], length: float) -> Falsehood:
    """s + ``length`` ‖βΔ‖ along ``gradient`` (flat, of all elements), where the loss grows fastest."""
    whole = torch.empty(0)

    def false(s: Tensor, changed: Tensor, start: int) -> Tensor:
        nonlocal whole
        whole = gradient() if start == 0 else whole  # the first part is sent first
        way = whole[start : start + len(s)]
        return s + length * changed.norm() / way.norm() * way

    return false


def gradient(state: PeerState) -> Tensor:
    """The gradient of the loss on the next batch of a peer, flat."""
    (batch,) = state.stream.take(1)
    loss = batch_loss(state.inner.model, batch, state.inner.device, autocast=False)
    return torch.cat([it.flatten() for it in torch.autograd.grad(loss, [*state.inner.model.parameters()])])


def false_of(attack: Attack) -> Falsehood:
    """What a member with this attack sends instead of s, given s and βΔ of a part."""
    match attack:
        case Attack.NAN:
            return lambda s, change, start: torch.where(torch.arange(len(s)) % max(1, len(s) // 3) == 0, torch.nan, s)
        case Attack.POISON:
            return poison(4.0)
    own, change, noise = {
        Attack.SIGN: (1.0, -2.0, 0.0),
        Attack.SCALE: (3.0, 0.0, 0.0),
        Attack.RANDOM: (0.0, 0.0, 1.0),
        Attack.STALE: (1.0, 0.0, 0.0),
        Attack.HUGE: (100.0, 0.0, 0.0),
        Attack.LOUD: (1.9, 0.0, 0.0),
        Attack.NOISY: (0.4, 0.0, 0.9),
        Attack.DROWNED: (0.15, 0.0, 1.0),
    }[attack]
    return mixture(own, change, noise)


def creeping(state: PeerState) -> Falsehood:
    """A slow poison by who has read the guard and the rollback: s + a step along the gradient, in each round the
    longest after which a mean with s harms by less than a merge may. Those that collude have the same ``state``.
    """
    way, length = torch.empty(0), 0.0

    def false(s: Tensor, changed: Tensor, start: int) -> Tensor:
        nonlocal way, length
        if start == 0:
            way, (batch,) = gradient(state), state.stream.take(1)
            way /= way.norm()
            honest = _shifted_loss(state, batch, 0.0 * way)
            fits = (
                it for it in STEPS if _shifted_loss(state, batch, it / 2 * changed.norm() * way) <= UNNOTICED * honest
            )
            length = next(fits, 0.0)
        return s + length * changed.norm() * way[start : start + len(s)]

    return false


def _shifted_loss(state: PeerState, batch: Tensor, shift: Tensor) -> float:
    """The loss on ``batch`` with ``shift`` (flat) added to the weights."""
    vectors, before = [*state.inner.model.parameters()], 0
    kept = [it.detach().clone() for it in vectors]
    with torch.no_grad():
        for vector in vectors:
            vector += shift[before : before + vector.numel()].view_as(vector)
            before += vector.numel()
        loss = float(batch_loss(state.inner.model, batch, state.inner.device, autocast=False))
        for vector, value in zip(vectors, kept, strict=True):
            vector.copy_(value)
    return loss


class Hostile(Cast):
    """The codec of a hostile peer (:class:`peer.exchange.codec.Codec`): ``none``, or ``fp16``, which all understand
    that have a modulo codec. ``false``: of s and βΔ of a part, what it sends.
    """

    def __init__(self, attack: Attack | Falsehood, name: CodecName = "none") -> None:
        super().__init__(name)
        self.understands = (name, "fp16", "int8", "int4")
        self._stale = attack is Attack.STALE
        self._false = false_of(attack) if isinstance(attack, Attack) else attack
        self._change: dict[int, Tensor] = {}
        self._first: dict[int, bytes] = {}

    def begin(self) -> bool:
        return True

    def learn(self, start: int, change: Tensor) -> None:
        self._change[start] = change.clone()

    def encode(self, start: int, part: Tensor) -> bytes:
        data = super().encode(start, self._false(part, self._change[start], start))
        return self._first.setdefault(start, data) if self._stale else data


class Unguarded(Guard):
    """Refuses only contributions that are not finite, and takes all others in full."""

    def judgement(self, partner: str, numel: int) -> Judgement:
        return _Unguarded(self, partner, numel)


class _Unguarded(Judgement):
    def add(self, start: int, own: Tensor, change: Tensor, theirs: Tensor, unresolved: int = 0) -> float:
        super().add(start, own, change, theirs, unresolved)
        return self.share

    def objection(self, digest: bytes) -> Verdict | None:
        found = super().objection(digest)
        return found if found is not None and found.reason is Reason.NOT_FINITE else None
