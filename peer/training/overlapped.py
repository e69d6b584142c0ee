"""The boundary of a peer that does not wait: the swap runs while the next inner steps do (``run.exchange.overlap``).

At a boundary a helper thread looks for a partner. When it is there, the parts of the model take their outer step one
after the other, each between two inner steps: first as in a group of one, then amended by what the partner sent
(outer/noloco.py). Without a partner all parts take the step of a group of one.

Previous station: exchange/pair/overlapped.py. Next stations: trainer.py, api/loop.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from peer.exchange.pair.mailbox import OpenPart, SwapMailbox
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.outer.method import PartwiseMethod
from peer.replica.inner_loop import InnerReport
from peer.rounds.types import Group
from peer.telemetry.report import BoundaryReport
from peer.training.boundary import Boundary
from peer.training.phase import PhaseLength

STOP_PATIENCE = 10.0  # seconds for a swap that is on its way when this peer is asked to stop
LOOK_SECONDS = 0.05  # seconds between two looks at a swap that is waited for


@dataclass(frozen=True)
class EndedPhase:
    """An inner phase whose swap has not begun."""

    inner: InnerReport
    tokens: int  # trained on in the round: the weight of this peer's contribution
    number: int  # of the inner phase, from 1


@dataclass(frozen=True)
class SwapUnderWay:
    """A round whose swap is on its way: what its report will say."""

    mailbox: SwapMailbox
    boundary: BoundaryReport
    opened: dict[int, int] = field(default_factory=dict)  # part: the inner step at which it was opened
    late: list[int] = field(default_factory=list)  # inner steps between that and the arrival of the partner's part


@dataclass
class Overlapped(Boundary):
    """One swap at a time. It is waited for at the end of the run only. ``method`` is the state's outer method."""

    exchange: OverlappedPairExchange
    method: PartwiseMethod
    phase_length: PhaseLength
    _ended: EndedPhase | None = None
    _swap: SwapUnderWay | None = None

    def cross(self, inner: InnerReport) -> bool:
        """The round is over, and its swap begins with the next inner step: a partner must not wait while this peer
        evaluates. While the last swap is on its way the boundary is postponed, unless the run ends before the next one.
        """
        if self._swap is not None and not self.phase_length.run_ends():
            self.state.postpone_boundary()
            return False
        self.finish()
        self._ended = EndedPhase(inner, self.counters.phase_tokens, self.context.progress.phases)
        self.state.cross_boundary()
        return True

    def between_steps(self) -> None:
        """Begin the swap of the phase that has ended, or go on with it."""
        self._launch()
        self._advance()

    def finish(self) -> None:
        """Wait for the swap that is on its way, if any; its deadline bounds this, and a stop leaves it little time."""
        with self.phase("exchange"):
            self._launch()
            until = time.monotonic() + STOP_PATIENCE
            while self._swap is not None:
                self._advance(idle=True)
                if self._swap is not None:
                    self._swap.mailbox.wait(LOOK_SECONDS)
                    if self.context.stop.requested and time.monotonic() > until:
                        self._swap.mailbox.cancel()

    def _launch(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None:
            return
        round = self.counters.round - 1

        def meet() -> Group:
            return replace(self.presence.group_for(round, ended.number), tokens=ended.tokens)

        mailbox = self.exchange.start(self.context.progress.step_seconds, meet)
        self._swap = SwapUnderWay(mailbox, self.reached(ended.inner))

    def _advance(self, *, idle: bool = False) -> None:
        """Apply the corrections that have arrived and open the next parts. ``idle``: no inner steps run meanwhile."""
        swap = self._swap
        if swap is None:
            return
        mailbox = swap.mailbox
        result = mailbox.result()
        arrived = mailbox.take_corrections()
        wanted = mailbox.unopened() if result is not None else mailbox.parts_to_open(idle=idle)
        if arrived or wanted or result is not None:
            with self.phase("apply"):
                for index, correction in arrived:
                    self.method.amend(mailbox.parts[index][0], correction)
                    swap.late.append(self.state.inner.step - swap.opened[index])
                for index in wanted:
                    self._open(swap, index)
        if result is not None:
            self._swap = None
            self.presence.ended(result)
            self.report(swap.boundary, replace(result, staleness=fmean(swap.late) if swap.late else 0.0))

    def _open(self, swap: SwapUnderWay, index: int) -> None:
        start, stop = swap.mailbox.parts[index]
        own, change = torch.empty(stop - start), torch.empty(stop - start)
        self.method.open(start, own, change)
        swap.opened[index] = self.state.inner.step
        swap.mailbox.put(index, OpenPart(own, change))
