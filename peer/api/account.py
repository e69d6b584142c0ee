"""The reports between a program's own loop and its peer: steps of the program, rounds of the peer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from torch import Tensor

from peer import clock
from peer.errors import UserError
from peer.replica.inner_loop import InnerReport
from peer.rounds.types import Outcome
from peer.telemetry.report import RoundReport


@dataclass(frozen=True)
class Round:
    """How a round ended."""

    round: int  # from 1
    step: int  # of the swarm, at its boundary
    outcome: Outcome
    partners: tuple[str, ...]  # names of the peers with which it exchanged
    seconds: Mapping[str, float]  # by activity, since the last round
    idle_share: float  # since the start
    members: int  # live ones, with this peer
    distance: float | None  # of the two contributions of a pair, relative to this peer's own; None: unknown
    bytes_sent: int
    bytes_received: int
    detail: str  # why it did not merge

    @classmethod
    def of(cls, report: RoundReport) -> Round:
        boundary, averaged = report.boundary, report.averaged
        return cls(
            round=boundary.round,
            step=boundary.step,
            outcome=averaged.outcome,
            partners=averaged.partners,
            seconds=report.seconds,
            idle_share=report.idle_share,
            members=report.members,
            distance=averaged.distance,
            bytes_sent=averaged.bytes_sent,
            bytes_received=averaged.bytes_received,
            detail=averaged.detail,
        )


def token_count(value: Any) -> int:
    """``tokens`` of a step. Raises :class:`UserError` for what is no number of tokens."""
    count = float(one_number("tokens", value))
    if not 0 <= count < math.inf:
        raise UserError(f"OuterLoop.step: tokens is {count:g}; how many has this step trained on?")
    return int(count)


def one_number(key: str, value: Any) -> float | Tensor:
    """The number that the program gives as ``key`` of a step. Raises :class:`UserError` for anything else.

    Of a tensor it is a copy: it is read up to H steps later, and the program may write to it (a CUDA graph's output).
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).clone()
    said = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    try:
        if not isinstance(value, Tensor | str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise UserError(f"OuterLoop.step: {key} is {said}; give one number for the step")


class StepAccount:
    """The steps since the last boundary. Losses stay on their device: no step waits for the accelerator."""

    def __init__(self) -> None:
        self._rate = 0.0  # tokens a step in the last phase
        self.begin()

    def add(self, tokens: int, loss: float | Tensor | None) -> None:
        """One step of the optimizer was made; ``loss``: nats a token, or ``None`` when unknown."""
        self._steps += 1
        self._tokens += tokens
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def tokens_per_step(self) -> float:
        """Call it from any thread."""
        tokens, steps = self._tokens, self._steps  # in this order: begin() clears the steps first
        return tokens / steps if steps else self._rate

    def report(self, learning_rate: float) -> InnerReport:
        """The phase has ended and another one begins; returns the report of the first. Its loss is that of the finite
        ones: a batch may have none and do no harm (all its labels are masked).
        """
        losses = [value for loss in self._losses if math.isfinite(value := float(loss))]
        inner = InnerReport(
            steps=self._steps,
            tokens=self._tokens,
            loss=sum(losses) / len(losses) if losses else math.nan,
            first_loss=losses[0] if losses else math.nan,
            grad_norm=math.nan,
            learning_rate=learning_rate,
            seconds=clock.monotonic() - self._began,
            losses=len(losses),
            spread=stdev(losses) if len(losses) > 1 else math.nan,
            broken_losses=len(self._losses) - len(losses),
        )
        self._rate = self.tokens_per_step()
        self.begin()
        return inner

    def begin(self) -> None:
        """A phase begins: discard the added steps."""
        self._steps = self._tokens = 0
        self._losses: list[float | Tensor] = []
        self._began = clock.monotonic()
