"""Fast weights on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from peer.device.copies import Completion


@dataclass(frozen=True)
class Fetched:
    """Elements ``start : stop`` of θ at one moment, on their way to the host. ``theta``: in θ's dtype, valid once
    :meth:`arrived`; ``None`` on a device without streams, where θ itself is read.
    """

    start: int
    stop: int
    theta: Tensor | None = None
    copied: Completion | None = None

    def arrived(self, *, wait: bool = False) -> bool:
        """May it be read? ``wait``: until it may."""
        if self.copied is not None and wait:
            self.copied.synchronize()
        return self.copied is None or self.copied.query()
