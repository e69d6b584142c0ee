"""A peer whose inner steps take a given time, as on its own accelerator.

python -m tests.benchmarks.wan.paced_peer train ...      PACE in the environment: least seconds of an inner step

It trains as every peer does and sleeps for the rest of the time. So one of several peers on two cores can be slower
than the others by a known factor, whatever the load.
"""

from __future__ import annotations

import os
import time

from torch import Tensor

import peer.training.replica
from peer.commands.cli import main
from peer.replica.inner_loop import InnerLoop


class Paced(InnerLoop):
    """A step takes at least ``PACE`` seconds."""

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        until = time.monotonic() + float(os.environ["PACE"])
        done = super()._train_step(batch, rate)
        time.sleep(max(0.0, until - time.monotonic()))
        return done


if __name__ == "__main__":
    peer.training.replica.InnerLoop = Paced  # type: ignore[misc]
    main()
