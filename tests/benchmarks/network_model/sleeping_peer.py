"""``noloco-peer`` with sleeps as inner steps, so that 16 peers do not compete for two cores.

python -m tests.benchmarks.network_model.sleeping_peer train ...  environment: STEP_SECONDS, STEP_SIGMA (log-normal)

Node, matchmaking, swap and outer step are real.
"""

from __future__ import annotations

import os
import random
import time

import torch
from torch import Tensor

import peer.training.replica
from peer.commands.cli import main
from peer.replica.inner_loop import InnerLoop


class Sleeping(InnerLoop):
    """Sleeps and leaves the weights unchanged."""

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        sigma = float(os.environ["STEP_SIGMA"])
        time.sleep(float(os.environ["STEP_SECONDS"]) * random.lognormvariate(0.0, sigma))
        return torch.zeros(()), torch.zeros(())


if __name__ == "__main__":
    peer.training.replica.InnerLoop = Sleeping  # type: ignore[misc]
    main()
