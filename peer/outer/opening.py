"""The outer step of parts, each when its θ has come from the accelerator; for a swap beside the inner steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import Fetched, broken_weight
from peer.rounds.contribution import host_vector

# Parts at once, each in pinned memory and on the device. They arrive an inner step or two later, so a fixed number
# would be the most that a step carries, whatever the line and the model.
LEAST_COMING = 16
COMING_SHARE = 16  # a sixteenth of all parts, if that is more


def most_coming(count: int) -> int:
    """Of ``count`` parts, how many are on their way at once."""
    return max(LEAST_COMING, count // COMING_SHARE)


class PartOpening:
    """``parts``: their borders. ``steps``: by part, the inner step of its θ. Used by the training thread.

    Parts that come from an accelerator are opened one or two inner steps after they were asked for; the others at once.
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
