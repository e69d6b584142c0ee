"""When a merge has done harm: by the training losses after it, and by losses with it and without it on the same text.

Pure. All losses are in nats a token; NaN is above everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

JUMP = 1.1  # times the usual loss: so much may the loss be; after honest merges the median is 0.97
SPREADS = 4.0  # and so many standard deviations above it, of a mean of as many losses: single batches scatter
SURE = 2.0  # standard errors of the difference by batch: a few short batches scatter by more than ``HARM``
HARM = 1.02  # times the loss without the merge, on the same batches, for a whole merge; half of one may do some harm


def above(loss: float, bound: float) -> bool:
    """``loss`` > ``bound``, or it is NaN."""
    return not loss <= bound


def jumped(losses: Sequence[float], usual: float, spread: float) -> float | None:
    """The mean of the last losses, as many as show a jump; ``None`` when none do. ``spread``: standard deviation of a
    usual loss.
    """
    total = 0.0
    for count, loss in enumerate(reversed(losses), 1):
        total += loss
        if above(total, count * max(JUMP * usual, usual + SPREADS * spread / math.sqrt(count))):
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
    sure = above(with_it, JUMP * alone) or above(fmean(differences), SURE * error)
    return sure and above(with_it, bound * alone)


def pooled(reports: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all losses, by the number, mean and standard deviation of each report's; NaN for
    the deviation of one loss.
    """
    known = [(count, loss, spread if count > 1 else 0.0) for count, loss, spread in reports]
    total = sum(count for count, _, _ in known)
    mean = sum(count * loss for count, loss, _ in known) / total
    squares = sum((count - 1) * spread**2 + count * (loss - mean) ** 2 for count, loss, spread in known)
    return mean, math.sqrt(squares / (total - 1)) if total > 1 else math.nan
