"""Takes a merge of two peers back when the training loss jumps after it.

The guard bounds how far a contribution moves the weights, not in which direction. Along the gradient of the loss a
hostile one can double the loss within the distance that honest peers need. The first losses after the merge show that
at no cost. A batch of unusual text shows the same, so the loss with and without the merge decides, on the same
validation batches, where there are any. In a program's own loop there are none, so one unusual loss counts as none, and
only two in succession show a jump. Of those that are not finite (all labels of a batch are masked) none counts where
the phase before had one too, except by a merge that was undone. The outer step is linear in the mean, so until the next
boundary the merge can be undone: its corrections are subtracted from θ, φ and δ (:meth:`NoLoCo.amend`). After a jump θ
becomes φ in the corrected parts, so what was trained there since their outer step is dropped. Where no loss jumps and
the validation batches decide before the next merge (:meth:`Rollback.judge_before_next`), it remains.

All losses are in nats a token. NaN is above everything, so "above" is written ``not … <=`` here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from peer.device.copies import Copied, copied_scalar
from peer.logs import get_logger
from peer.outer.noloco import NoLoCo
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged, parts
from peer.training.outer_state import OuterState

log = get_logger("rollback")

# Inner steps whose losses judge a merge. A mean of 16 scatters by a quarter as much as one loss, so a rise by one
# standard deviation of a loss still counts (SPREADS). The corrections, as large as the model, are kept until then.
JUDGES = 16
USUAL_LOSSES = 16  # recent losses that are usual, or those of the last phase
JUMP = 1.1  # times the usual loss: so much may the loss be; after honest merges the median is 0.97
SPREADS = 4.0  # and so many standard deviations above it, of a mean of as many losses: single batches scatter
SURE = 2.0  # standard errors of the difference by batch: a few short batches scatter by more than ``HARM``
HARM = 1.02  # times the loss without the merge, on the same batches, for a whole merge; half of one may do some harm

Sample = Callable[[], Sequence[float]]


@dataclass
class Trial:
    """A merge that may be undone. ``corrections``: first element, and mean less own contribution."""

    corrections: Sequence[tuple[int, Tensor]]
    step: int  # of the inner loop when its loss was last taken
    usual: float  # loss before it, nats a token
    spread: float  # standard deviation of a step's loss; NaN when unknown, then no loss judges
    applied: int  # the inner step at which the last correction was applied
    merge: Averaged | None  # ``None`` while the swap runs
    judged: int = 0  # the inner step of the last loss that was judged
    broken: int = 0  # so many of the last losses were not finite
    unusual: bool = False  # the last loss, by itself, was above what is usual
    usually_broken: bool = False  # a loss of the phase before was not finite: another one says nothing of it
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGES))
    arriving: deque[tuple[int, Copied]] = field(default_factory=deque)  # inner steps and their losses


class Rollback:
    """The last merge of one peer. Used by its training thread. ``undone``: gets what was undone, and why in words.
    ``sample``: the losses of the current weights on some validation batches (nats a token).
    """

    def __init__(self, state: OuterState, undone: Callable[[Trial, str], None], sample: Sample | None = None) -> None:
        self._state, self._undone, self._sample = state, undone, sample
        self._recent: deque[InnerReport] = deque()
        self.trial: Trial | None = None  # the last merge, while it may be undone
        self._at_rest = False
        self._broken = 0.0  # the share of the last phase's losses that were not finite, less those of an undone merge
        self._excused = 0  # so many of this phase's, at most, are those of a merge that was undone
        self._replaced = state.replaced  # of the weights that all this is of
        self._known: Sequence[float] | None = None  # what ``sample`` gives for the current weights

    def trained(self, inner: InnerReport) -> None:
        """Some inner steps were made: their losses are usual."""
        self._follow()
        if inner.broken_losses:
            self.look(wait=True)  # a merge that they undo is to blame for some of them
        broken, self._excused = max(0, inner.broken_losses - self._excused), 0
        if told := inner.losses + broken:
            was, self._broken = self._broken, broken / told
            if self._broken > 0.5 >= was:
                log.warning("most losses that the program gives are not finite: they judge no merge")
        if math.isfinite(inner.loss):
            self._recent.append(inner)
            while sum(it.losses for it in self._recent) - self._recent[0].losses >= USUAL_LOSSES:
                self._recent.popleft()

    def begin(self, corrections: Sequence[tuple[int, Tensor]], merge: Averaged | None) -> None:
        """``corrections`` are being applied. They may grow until :meth:`all_applied` if there is no ``merge`` yet; each
        of them may not change any more.
        """
        self._follow()
        if self._recent:
            usual, spread = pooled((it.losses, it.loss, it.spread) for it in self._recent)
            step = self._state.inner.step
            self.trial = Trial(corrections, step, usual, spread, step, merge, usually_broken=self._broken > 0)

    def all_applied(self, merge: Averaged) -> None:
        """There are no further corrections."""
        self._follow()
        if self.trial is not None:
            self.trial.merge, self.trial.applied = merge, self._state.inner.step

    def _follow(self) -> None:
        """When other weights have replaced these, the last merge and the usual losses say nothing of them."""
        if self._replaced != self._state.replaced:
            self._replaced, self.trial, self._known = self._state.replaced, None, None
            self._recent.clear()

    def skip(self, steps: int) -> None:
        """Call it before the swarm's step counts ``steps`` further that this peer has not made."""
        self.look(wait=True)
        trial = self.trial
        if trial is not None:
            trial.step, trial.applied = trial.step + steps, trial.applied + steps
            trial.judged += steps if trial.judged else 0

    def look(self, *, wait: bool = False) -> None:
        """Call it after each inner step: judge the merge while corrections come, and in the first steps after them.
        ``wait``: for the losses until now.
        """
        self._follow()
        trial, inner = self.trial, self._state.inner
        if trial is None:
            return
        if inner.step > trial.step and inner.loss is not None:
            trial.step = inner.step
            trial.arriving.append((inner.step, copied_scalar(inner.loss)))
        while trial.arriving and trial.arriving[0][1].arrived(wait=wait):
            step, loss = trial.arriving.popleft()
            self._judge(trial, step, float(loss.host))
            if self.trial is not trial:  # the losses of several steps may come at once from an accelerator
                return

    def training_ended(self) -> None:
        """From now on nothing but merges changes the weights: without the next one the loss is that after the last."""
        self._at_rest = True

    def judge_before_next(self, *, left: float, sampled: bool = True) -> None:
        """Judge the merge before the next one, ``left`` inner steps before the run ends. If no inner step has followed
        it, or too few are left that could tell: by the validation batches, unless there is no time for them (not
        ``sampled``).
        """
        self.look(wait=True)
        trial, self.trial = self.trial, None
        if trial is None or not trial.corrections or (trial.judged > trial.applied and left >= JUDGES):
            return
        if sampled and self._sample is not None and (detail := self._taken_back(trial, self._sample, HARM)):
            self._undone(trial, detail)

    def _judge(self, trial: Trial, step: int, loss: float) -> None:
        if not trial.corrections:
            return
        if trial.merge is not None and step > trial.applied + JUDGES:  # a program may tell a loss in few of its steps
            self.trial = None
            return
        trial.broken = 0 if math.isfinite(loss) else trial.broken + 1
        counts = self._sample is not None or _counts(trial, loss)
        if math.isfinite(trial.spread) and counts:  # one loss does not say how far from it others may be
            trial.judged = step
            trial.losses.append(loss)
        if (mean := jumped(trial.losses, trial.usual, trial.spread)) is not None:
            detail = f"the loss was {mean:.4g} after this merge and {trial.usual:.4g} before it"
            if self._sample is None:
                self._amend(trial, -1.0)
            elif not (detail := self._taken_back(trial, self._sample, JUMP)):
                trial.losses.clear()
                return
            for start, correction in trial.corrections:
                self._state.outer.slow.write_fast(start, start + correction.numel())
            self.trial, self._excused = None, trial.broken + len(trial.arriving)
            self._undone(trial, detail)
        elif trial.merge is not None and step >= trial.applied + JUDGES:
            self.trial = None

    def _taken_back(self, trial: Trial, sample: Sample, bound: float) -> str:
        """Take the corrections back if the loss with them is above ``bound`` times that without; returns why, if so."""
        merged = sample()
        if self._known is not None and not harmful(merged, self._known, bound):
            self._known = merged
            return ""
        self._amend(trial, -1.0)
        without = sample()
        stays = not harmful(merged, without, bound)
        if stays:
            self._amend(trial, 1.0)
        if self._at_rest:
            self._known = merged if stays else without
        if stays:
            return ""
        return f"the loss was {fmean(merged):.4g} with this partner's weights and {fmean(without):.4g} without them"

    def _amend(self, trial: Trial, sign: float) -> None:
        assert isinstance(self._state.outer, NoLoCo)
        for start, correction in trial.corrections:
            for low, high in parts(correction.numel()):
                self._state.outer.amend(start + low, correction[low:high].float() * sign)


def _counts(trial: Trial, loss: float) -> bool:
    """Note a loss where no validation batches decide; returns whether it counts."""
    if trial.usually_broken and not math.isfinite(loss):
        return False
    before, trial.unusual = trial.unusual, jumped([loss], trial.usual, trial.spread) is not None
    return before or not trial.unusual


def jumped(losses: Sequence[float], usual: float, spread: float) -> float | None:
    """Mean of the last losses, as many as show a jump, or ``None``. ``spread``: standard deviation of a usual loss."""
    total = 0.0
    for count, loss in enumerate(reversed(losses), 1):
        total += loss
        if not total <= count * max(JUMP * usual, usual + SPREADS * spread / math.sqrt(count)):
            return total / count
    return None


def harmful(merged: Sequence[float], without: Sequence[float], bound: float) -> bool:
    """Is the mean loss with the merge more than ``bound`` times that without it and, where it is no jump, by more than
    chance? Losses are by batch, of the same batches.
    """
    with_it, alone, count = fmean(merged), fmean(without), len(merged)
    differences = [one - two for one, two in zip(merged, without, strict=True)]
    square = sum((it - fmean(differences)) ** 2 for it in differences)
    error = math.sqrt(square / (count * (count - 1))) if count > 1 else 0.0
    sure = not with_it <= JUMP * alone or not fmean(differences) <= SURE * error
    return sure and not with_it <= bound * alone


def pooled(reports: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all losses, by the number, mean and standard deviation of each report's; NaN for
    the deviation of one loss.
    """
    known = [(count, loss, spread if count > 1 else 0.0) for count, loss, spread in reports]
    total = sum(count for count, _, _ in known)
    mean = sum(count * loss for count, loss, _ in known) / total
    squares = sum((count - 1) * spread**2 + count * (loss - mean) ** 2 for count, loss, spread in known)
    return mean, math.sqrt(squares / (total - 1)) if total > 1 else math.nan
