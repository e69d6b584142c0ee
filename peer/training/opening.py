"""Opens the parts of an overlapped swap, in their order, each when its θ has come from the accelerator."""

from __future__ import annotations

from collections import deque

import torch

from peer.exchange.pair.mailbox import OpenPart, SwapMailbox
from peer.outer.noloco import NoLoCo
from peer.outer.side_stream import Fetched

MOST_COMING = 16  # parts at once, of at most 1 MiB each in pinned memory and on the device


class PartOpening:
    """The parts of one swap. ``steps``: by part, the inner step of its θ. Used by the training thread.

    Parts that come from an accelerator are opened one or two inner steps after they were asked for; the others at once.
    """

    def __init__(self, method: NoLoCo, mailbox: SwapMailbox) -> None:
        self.steps: dict[int, int] = {}
        self._method, self._mailbox = method, mailbox
        self._coming: deque[tuple[int, Fetched]] = deque()

    def __bool__(self) -> bool:
        """Some parts are still coming."""
        return bool(self._coming)

    def open(self, wanted: range, step: int, *, wait: bool) -> None:
        """Ask for the parts ``wanted`` at the inner step ``step``, and open those that have come; ``wait``: all."""
        for index in wanted:
            if index in self.steps:
                continue
            if len(self._coming) == MOST_COMING:
                self._open_arrived(wait=wait)
                if self._coming:
                    return  # the mailbox asks again
            self.steps[index] = step
            self._coming.append((index, self._method.slow.fetch(*self._mailbox.parts[index])))
        self._open_arrived(wait=wait)

    def _open_arrived(self, *, wait: bool) -> None:
        while self._coming and self._coming[0][1].arrived(wait=wait):
            index, fetched = self._coming.popleft()
            own, change = torch.empty(fetched.stop - fetched.start), torch.empty(fetched.stop - fetched.start)
            self._method.open(fetched, own, change)
            self._mailbox.put(index, OpenPart(own, change))
