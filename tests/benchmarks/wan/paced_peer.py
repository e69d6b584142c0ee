"""A peer whose inner steps take a given time, as those of an accelerator of its own would.

python -m tests.benchmarks.wan.paced_peer train ...      PACE, the least seconds of an inner step, in the environment

It trains as every peer does and sleeps for what is left of the time. So one of several peers on two cores can be
slower than the others by a known factor, whatever they have to do.
"""

from __future__ import annotations

import os
import time

from torch import Tensor

import peer.training.replica
from peer.commands.cli import main
from peer.replica.inner_loop import InnerLoop


class Paced(InnerLoop):
    """As a machine that needs ``PACE`` seconds for a step."""

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        until = time.monotonic() + float(os.environ["PACE"])
        done = super()._train_step(batch, rate)
        time.sleep(max(0.0, until - time.monotonic()))
        return done


if __name__ == "__main__":
    peer.training.replica.InnerLoop = Paced  # type: ignore[misc]
    main()
