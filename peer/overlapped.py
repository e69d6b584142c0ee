"""The loop of a peer that never stands still: the swap runs beside the next inner steps (``run.exchange.overlap``).

inner: H steps of AdamW, and between them parts of the swap → at the boundary: begin to look for the next partner, go on

At each boundary a helper thread looks for a partner. When it is there, the parts of the model take their outer step one
after the other, each between two inner steps: first as in a group of one, then amended by what the partner sent
(outer/noloco.py). Without a partner all parts take the step of a group of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from peer.config import Config
from peer.exchange.flight import Flight, Opened
from peer.exchange.rolling import RollingExchange
from peer.inner import InnerReport
from peer.outer.method import PartwiseMethod
from peer.report import Counted
from peer.rounds import Group
from peer.training import Parts, Training

LEAVING = 10.0  # seconds for a swap that is on its way when this peer is asked to stop
WAIT = 0.05  # seconds between two looks at a swap that is waited for


@dataclass(frozen=True)
class UnderWay:
    """A round whose swap is on its way: what its report will say."""

    flight: Flight
    counted: Counted
    opened: dict[int, int]  # inner step at which a part was opened
    late: list[int]  # inner steps between that and the arrival of the partner's


class OverlappedTrainer(Training):
    """Stands nowhere, but at the end of the run and when a swap takes longer than an inner phase."""

    def __init__(self, config: Config, parts: Parts, exchange: RollingExchange, outer: PartwiseMethod) -> None:
        super().__init__(config, parts)
        self._partwise, self._rolling = outer, exchange
        self._round: UnderWay | None = None

    def loop(self) -> None:
        phase = self.phase
        while not self.done():
            with phase("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.too_early():
                self.parts.state.postpone_boundary()
                continue
            with phase("exchange"):
                self.finish()
            if self.remaining():
                return
            tokens = self.counters.phase_tokens
            self.parts.state.cross_boundary()
            self.now_and_then()  # before the swap: a partner must not wait while we evaluate
            self.launch(inner, tokens)
        with phase("exchange"):
            self.finish()

    def too_early(self) -> bool:
        """The last swap is still on its way: train on rather than wait, but at the end of the run."""
        left = self.config.run.steps - self.inner.step
        return self._round is not None and not self.remaining() and left > self.config.run.inner_steps

    def batches(self) -> Iterator[Tensor]:
        """Training batches up to the next boundary; the swap goes on between them."""
        for batch in super().batches():
            if self._round is not None:
                self.pump(self._round)
            yield batch

    def launch(self, inner: InnerReport, tokens: int) -> None:
        """Behind a boundary: the swap of the round that has ended begins. ``tokens``: trained on in it."""
        progress = self.parts.progress
        round, number = self.counters.round - 1, progress.phases

        def meet() -> Group:
            return replace(self.presence.group_beside(round, number), tokens=tokens)

        flight = self._rolling.start(progress.step_seconds, meet)
        self._round = UnderWay(flight, self.counted(inner), {}, [])

    def pump(self, round: UnderWay, *, resting: bool = False) -> None:
        """Take in what has landed, open what is wanted. ``resting``: no inner steps run meanwhile."""
        flight = round.flight
        result = flight.result()
        landed, wanted = flight.take(), flight.rest() if result is not None else flight.wanted(resting=resting)
        if landed or wanted or result is not None:
            with self.phase("apply"):
                for index, correction in landed:
                    self._partwise.amend(flight.parts[index][0], correction)
                    round.late.append(self.inner.step - round.opened[index])
                for index in wanted:
                    self._open(round, index)
        if result is not None:
            self._round = None
            self.presence.avoid(result.culprit, result.outcome)
            self.report(round.counted, replace(result, staleness=fmean(round.late) if round.late else 0.0))

    def finish(self) -> None:
        """Wait for the swap that is on its way, if any; its deadline bounds this, and a stop leaves it little time."""
        until = time.monotonic() + LEAVING
        while self._round is not None:
            self.pump(self._round, resting=True)
            if self._round is not None:
                self._round.flight.wait(WAIT)
                if self.parts.stop.requested and time.monotonic() > until:
                    self._round.flight.break_off()

    def _open(self, round: UnderWay, index: int) -> None:
        start, stop = round.flight.parts[index]
        own, change = torch.empty(stop - start), torch.empty(stop - start)
        self._partwise.open(start, own, change)
        round.opened[index] = self.inner.step
        round.flight.offer(index, Opened(own, change))
