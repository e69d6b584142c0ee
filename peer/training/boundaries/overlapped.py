"""The boundary of a peer that does not wait: the swap runs during the next inner steps (``run.exchange.overlap``).

At a boundary a helper thread finds a partner. Then the parts of the model take their outer step one after the other,
each between two inner steps: first as a group of one, then with a correction by the partner's part (outer/noloco.py).
Without a partner all parts take the step of a group of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import Tensor

from peer import clock
from peer.errors import one_line
from peer.exchange.pair.mailbox import OpenPart, SwapMailbox
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.logs import get_logger
from peer.outer.noloco import NoLoCo, PartOpening
from peer.p2p.deadline import LEAVING_SECONDS
from peer.replica.inner_loop import InnerReport
from peer.rounds.types import Group, Outcome, Reason
from peer.telemetry.report import BoundaryReport
from peer.training.boundaries.boundary import Boundary
from peer.training.boundaries.rollback import Trial

log = get_logger("boundary")

LOOK_SECONDS = 0.05  # seconds between two checks of a swap at the end of the run


@dataclass(frozen=True)
class EndedPhase:
    """An inner phase whose swap has not begun."""

    inner: InnerReport
    tokens: int  # of the round: the weight of this peer's contribution
    number: int  # of the inner phase, from 1


@dataclass
class RunningSwap:
    """A swap that has not ended, and the values for its report."""

    mailbox: SwapMailbox
    boundary: BoundaryReport
    opening: PartOpening
    late: list[int] = field(default_factory=list)  # inner steps from the opening to the partner's part
    corrections: list[tuple[int, Tensor]] = field(default_factory=list)  # that were applied, in bf16
    harm: str = ""  # why they were undone
    abandoned: bool = False  # another state has replaced the one that it began with


@dataclass
class Overlapped(Boundary):
    """Runs one swap at a time and waits for it only at the end of the run."""

    exchange: OverlappedPairExchange
    _ended: EndedPhase | None = None
    _swap: RunningSwap | None = None

    def cross(self, inner: InnerReport) -> bool:
        """If the last swap still runs, this boundary is postponed (``False``); only after the run's last inner step it
        waits for that swap. Otherwise the round is over: what is left of the last swap is applied at once, and this
        round's swap begins with the next inner step, so that no partner waits while this peer evaluates.
        """
        self.rollback.trained(inner)
        if self._swap is not None and self._swap.abandoned:
            self._drop(self._swap)
        if self._swap is not None and self._swap.mailbox.result() is None and self.phase_length.steps_left > 0:
            self.state.begin_phase()
            self.presence.matchmaking.postpone()
            return False
        self.await_swap()
        self.judge()
        self._ended = EndedPhase(inner, self.counters.phase_tokens, self.context.progress.phase_number)
        with self.state.outer.slow.changing:  # a donor copies its state
            self.state.cross_boundary()
            # 0: no element has had its outer step. adopt() sets None, by which _launch() sees that another state came
            self.counters.unopened = 0
        return True

    def cut(self) -> None:
        left = self.phase_length.remaining()
        super().cut()
        if self._swap is not None:
            self._swap.opening.skip(left)

    def between_steps(self) -> None:
        """Begin the swap of the phase that has ended, or continue it."""
        super().between_steps()
        self._launch()
        self._advance()

    def await_swap(self) -> None:
        """The swap has a deadline of its own. When this peer is away, it is cancelled after ``LEAVING_SECONDS``."""
        with self.timer("exchange"):
            self._launch()
            until = clock.monotonic() + LEAVING_SECONDS
            while self._swap is not None:
                self._advance(idle=True)
                if self._swap is not None:
                    self._swap.mailbox.wait(LOOK_SECONDS)
                    if self.context.away and clock.monotonic() > until:
                        self._swap.mailbox.cancel()

    def abandon(self) -> None:
        """Give up the running swap and apply nothing more of it. One that has not ended after ``LEAVING_SECONDS`` is
        given up as soon as it can be; no other one begins before.
        """
        super().abandon()
        self._ended, self.counters.unopened = None, None
        if self._swap is None:
            return
        self._swap.abandoned = True
        with self.timer("exchange"):
            until = clock.monotonic() + LEAVING_SECONDS
            while (swap := self._swap) is not None and clock.monotonic() < until:
                self._drop(swap)
                swap.mailbox.wait(LOOK_SECONDS)

    def _drop(self, swap: RunningSwap) -> None:
        """Forget an abandoned swap once it has ended, or ask it to end: it cannot before it has met its partner."""
        swap.mailbox.take_corrections()
        try:
            result = swap.mailbox.result()
        except Exception as error:  # noqa: BLE001 - it is no error of the state that has replaced that one
            log.warning("a swap that was given up has failed: %s: %s", type(error).__name__, one_line(error))
        else:
            if result is None:
                swap.mailbox.cancel()
                return
            self.presence.ended(result)
        self._swap = None
        self.context.progress.swap_took(0.0)  # its time says nothing of the next one's

    def _launch(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None or self.counters.unopened is None:  # a member's state has replaced that of the phase
            return
        round, progress = self.counters.round - 1, self.context.progress  # cross() has counted it
        # None: no inner steps run meanwhile
        ended_phase_number = ended.number if progress.phase_number > ended.number else None
        step_seconds = progress.step_seconds

        def meet() -> Group:
            group = self.presence.group_for(round, ended_phase_number)
            phase_seconds = progress.phase_seconds
            return replace(group, tokens=ended.tokens, phase_seconds=phase_seconds, step_seconds=step_seconds)

        assert isinstance(self.outer, NoLoCo), "checked with the configuration"
        mailbox = self.exchange.start(meet)
        self._swap = RunningSwap(mailbox, self.reached(ended.inner), PartOpening(self.outer, mailbox.parts))
        self.rollback.begin(self._swap.corrections, None)

    def _advance(self, *, idle: bool = False) -> None:
        """Apply the corrections that have arrived and open the next parts. ``idle``: no inner steps run now.

        While they run, nothing here waits for the accelerator, also when the swap has ended and the rest is opened.
        """
        swap = self._swap
        if swap is None:
            return
        if swap.abandoned:
            self._drop(swap)
            return
        mailbox = swap.mailbox
        result = mailbox.result()
        arrived = [] if swap.harm else mailbox.take_corrections()
        wanted = mailbox.parts_to_open(idle=idle)
        if arrived or wanted or swap.opening:
            with self.timer("apply", queued=not idle):
                for index, correction in arrived:
                    swap.opening.method.amend(mailbox.parts[index][0], correction)
                    swap.corrections.append((mailbox.parts[index][0], correction.bfloat16()))
                    swap.late.append(self.state.inner.step - swap.opening.steps[index])
                for index, own, change in swap.opening.open(wanted, self.state.inner.step, wait=idle):
                    self.counters.unopened = mailbox.parts[index][1] if index + 1 < len(mailbox.parts) else None
                    mailbox.put(index, OpenPart(own, change))
        if result is not None and not mailbox.parts_left():
            self._swap = None
            if swap.harm:
                blamed = (result.partner_id,)
                result = replace(
                    result, outcome=Outcome.POISONED, reason=Reason.HARMFUL, detail=swap.harm, culprits=blamed
                )
            self.rollback.all_applied(result)
            self.presence.ended(result)
            self.report(swap.boundary, replace(result, staleness=fmean(swap.late) if swap.late else 0.0))

    def _undone(self, trial: Trial, detail: str) -> None:
        super()._undone(trial, detail)
        if trial.merge is None and self._swap is not None:
            self._swap.harm = detail
            self._swap.mailbox.cancel()
