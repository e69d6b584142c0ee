"""NoLoCo's outer step (arXiv 2506.10911, Eq. 1 to 3), with one tensor on the wire instead of two.

With Δᵢ = θᵢ − φᵢ and the group's mean over n peers

    δᵢ ← α δᵢ + mean_j(β Δⱼ + γ φⱼ) − γ φᵢ
    φᵢ ← φᵢ + δᵢ
    θᵢ ← φᵢ

so a peer sends the one tensor sⱼ = β Δⱼ + γ φⱼ = β θⱼ + (γ − β) φⱼ. (The sign of β is that of the paper's Eq. 32; Eq. 2
as printed ascends.) Stable in mean square for 0 < γ < 2(1 − α²).

After a run's last inner step Δ is zero, and a few more swaps bring all replicas to their mean. They are this formula
with α 0, β 1, γ 1: sᵢ = φᵢ and φᵢ ← mean_j φⱼ. (θᵢ is φᵢ only up to rounding, which would pass for training, so it is
not read.) Momentum would carry each replica on along the last changes of itself and its partners, which differ from
peer to peer; a γ below 1 would leave a part of each difference.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from peer.config.methods import NoLoCoConfig
from peer.outer.slow_weights import DenseContribution, Fetched, SlowWeights, broken_weight
from peer.rounds.contribution import host_vector, parts, scratch
from peer.rounds.types import Grouping

PLAIN_MEAN = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)
# Parts at once, each in pinned memory and on the device. They arrive an inner step or two later, so a fixed number
# would be the most that a step carries, whatever the line and the model.
LEAST_COMING = 16
COMING_SHARE = 16  # a sixteenth of all parts, if that is more


class NoLoCo:
    """Two peers partially average their weights; see the module's formula."""

    grouping: ClassVar[Grouping] = Grouping.PAIR
    equal_replicas: ClassVar[bool] = False

    def __init__(self, slow: SlowWeights, settings: NoLoCoConfig) -> None:
        self.slow = slow
        self.settings = settings
        self.momentum = slow.zeros()  # δ
        self._run_ended = False

    def contribution(self) -> DenseContribution:
        """sᵢ = β θᵢ + (γ − β) φᵢ; after :meth:`end_run` φᵢ, whose change is exactly 0."""
        beta = 0.0 if self._run_ended else self.settings.beta
        return DenseContribution(self.slow, beta, self.settings.gamma)

    def end_run(self) -> None:
        """No inner step follows: from now on each step is the plain mean of φ. δ keeps no momentum."""
        self.settings, self._run_ended = PLAIN_MEAN, True

    def apply(self, mean: Tensor) -> None:
        """``mean``: mean of s over the group."""
        with self.slow.changing:
            self._advance(slice(None), mean)
        self.slow.write_fast()

    def merge(self, mean: Tensor) -> Tensor:
        """As :meth:`apply`. Returns ``mean``, overwritten by the correction that :meth:`amend` would have got."""
        contribution, own = self.contribution(), scratch(self.slow.numel)
        with self.slow.changing:
            for start, stop in parts(self.slow.numel):
                contribution.read(start, own[: stop - start])
                self._advance(slice(start, stop), mean[start:stop])
                mean[start:stop].sub_(own[: stop - start])
        self.slow.write_fast()
        return mean

    # -- part by part, during the inner steps (boundaries/overlapped.py): first with a group of one, then corrected when
    # the partner's part has arrived

    def open(self, fetched: Fetched, own: Tensor, change: Tensor) -> bool:
        """``own`` (fp32, host) ← s, ``change`` ← βΔ of the elements that were ``fetched`` and have arrived; then their
        step with a group of one. θ keeps its training since.

        Both formulas are linear in the mean, so :meth:`amend` with half the difference of the two s makes it the step
        of a group of two. Returns ``False``, without a step, if s is not finite.
        """
        self.contribution().read_both(fetched.start, own, change, fetched)
        if not math.isfinite(own.sum()):  # in a fiftieth of the time of a look at each element
            return False
        with self.slow.changing:
            self._advance(slice(fetched.start, fetched.stop), own)
        self.slow.follow(fetched)
        return True

    def amend(self, start: int, correction: Tensor) -> None:
        """Add ``correction`` (fp32, host), the mean over the group less this peer's own contribution, to the mean
        afterwards: δ, φ and θ change by it; θ keeps its training since.
        """
        here = slice(start, start + correction.numel())
        with self.slow.changing:
            self.momentum[here].add_(correction)
            self.slow.shift(correction, start)

    def _advance(self, here: slice, mean: Tensor) -> None:
        """δ and φ of the elements ``here``, by their mean of s."""
        momentum, phi = self.momentum[here], self.slow.phi[here]
        momentum.mul_(self.settings.alpha).add_(mean).sub_(phi, alpha=self.settings.gamma)
        phi.add_(momentum)


def most_coming(count: int) -> int:
    """Of ``count`` parts, how many are on their way at once."""
    return max(LEAST_COMING, count // COMING_SHARE)


class PartOpening:
    """The outer step of the parts of an overlapped swap, each when its θ has come from the accelerator.

    ``parts``: their borders. ``steps``: by part, the inner step of its θ. Used by the training thread. Parts that
    come from an accelerator are opened one or two inner steps after they were asked for; the others at once.
    """

    def __init__(self, method: NoLoCo, parts: Sequence[tuple[int, int]]) -> None:
        self.steps: dict[int, int] = {}
        self.method, self._parts = method, parts
        self._most = most_coming(len(parts))
        self._coming: deque[tuple[int, Fetched]] = deque()

    def __bool__(self) -> bool:
        """Some parts are still coming."""
        return bool(self._coming)

    def skip(self, steps: int) -> None:
        """The swarm's step has advanced by so many that this peer has not made."""
        self.steps = {index: step + steps for index, step in self.steps.items()}

    def open(self, wanted: range, step: int, *, wait: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Ask for the parts ``wanted`` at the inner step ``step``, and open those that have come; ``wait``: all.

        Yields the number of each and what :meth:`NoLoCo.open` gives: its own contribution, and its change.
        Raises :class:`RunError` instead of opening weights that are not finite: nobody shall get them.
        """
        for index in wanted:
            if index in self.steps:
                continue
            if len(self._coming) == self._most:
                yield from self._arrived(wait=wait)
                if self._coming:
                    return  # the caller asks again
            fetched = self.method.slow.fetch(*self._parts[index])  # first: it may find no memory
            self.steps[index] = step
            self._coming.append((index, fetched))
        yield from self._arrived(wait=wait)

    def _arrived(self, *, wait: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        while self._coming and self._coming[0][1].arrived(wait=wait):
            index, fetched = self._coming[0]
            own, change = (host_vector(fetched.stop - fetched.start) for _ in range(2))
            if not self.method.open(fetched, own, change):  # it stays the next one: no part after it is opened
                broken = fetched.start + int(own.isfinite().logical_not().int().argmax())
                raise broken_weight(self.method.slow.name_at(broken), self.steps[index])
            self._coming.popleft()
            yield index, own, change
