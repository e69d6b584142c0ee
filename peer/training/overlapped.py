"""A boundary that nobody stands at: the swap runs beside the next inner steps, whoever makes them.

At a boundary a helper thread looks for a partner. When it is there, the parts of the model take their outer step one
after the other, each between two inner steps: first as in a group of one, then amended by what the partner sent
(outer/noloco.py). Without a partner all parts take the step of a group of one.

Previous station: exchange/pair/overlapped.py. Next stations: overlapped.py, own/loop.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from peer.exchange.pair.mailbox import OpenPart, SwapMailbox
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.outer.method import PartwiseMethod
from peer.process import Stop
from peer.rounds.contribution import Averaged
from peer.rounds.progress import Progress
from peer.rounds.types import Group
from peer.swarm.presence import Presence
from peer.telemetry.metrics import PhaseClock
from peer.telemetry.report import Counted
from peer.training.outer_state import OuterState

LEAVING = 10.0  # seconds for a swap that is on its way when this peer is asked to stop
WAIT = 0.05  # seconds between two looks at a swap that is waited for


@dataclass(frozen=True)
class UnderWay:
    """A round whose swap is on its way: what its report will say."""

    mailbox: SwapMailbox
    counted: Counted
    opened: dict[int, int]  # inner step at which a part was opened
    late: list[int]  # inner steps between that and the arrival of the partner's


class Beside:
    """One swap at a time; ``report`` is told how each has ended."""

    def __init__(
        self,
        state: OuterState,
        presence: Presence,
        exchange: OverlappedPairExchange,
        outer: PartwiseMethod,
        clock: tuple[PhaseClock, Progress, Stop],
        report: Callable[[Counted, Averaged], None],
    ) -> None:
        self._state, self._presence, self._rolling, self._partwise = state, presence, exchange, outer
        self._phase, self._progress, self._stop = clock
        self._report = report
        self._round: UnderWay | None = None

    @property
    def busy(self) -> bool:
        """A swap is on its way."""
        return self._round is not None

    def launch(self, counted: Counted, tokens: int) -> None:
        """Behind a boundary: the swap of the round that has ended begins. ``tokens``: trained on in it."""
        round, number = self._state.counters.round - 1, self._progress.phases

        def meet() -> Group:
            return replace(self._presence.group_beside(round, number), tokens=tokens)

        self._round = UnderWay(self._rolling.start(self._progress.step_seconds, meet), counted, {}, [])

    def pump(self, *, resting: bool = False) -> None:
        """Take in what has landed, open what is wanted. ``resting``: no inner steps run meanwhile."""
        round = self._round
        if round is None:
            return
        mailbox = round.mailbox
        result = mailbox.result()
        landed = mailbox.take_corrections()
        wanted = mailbox.unopened() if result is not None else mailbox.parts_to_open(idle=resting)
        if landed or wanted or result is not None:
            with self._phase("apply"):
                for index, correction in landed:
                    self._partwise.amend(mailbox.parts[index][0], correction)
                    round.late.append(self._state.inner.step - round.opened[index])
                for index in wanted:
                    self._open(round, index)
        if result is not None:
            self._round = None
            self._presence.ended(result)
            self._report(round.counted, replace(result, staleness=fmean(round.late) if round.late else 0.0))

    def finish(self) -> None:
        """Wait for the swap that is on its way, if any; its deadline bounds this, and a stop leaves it little time."""
        until = time.monotonic() + LEAVING
        while self._round is not None:
            self.pump(resting=True)
            if self._round is not None:
                self._round.mailbox.wait(WAIT)
                if self._stop.requested and time.monotonic() > until:
                    self._round.mailbox.cancel()

    def close(self) -> None:
        """No further swaps."""
        self._rolling.close()

    def _open(self, round: UnderWay, index: int) -> None:
        start, stop = round.mailbox.parts[index]
        own, change = torch.empty(stop - start), torch.empty(stop - start)
        self._partwise.open(start, own, change)
        round.opened[index] = self._state.inner.step
        round.mailbox.put(index, OpenPart(own, change))
