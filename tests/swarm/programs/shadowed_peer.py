"""A peer that writes its contribution and the mean of each swap to files, so that a test can check the arithmetic.

python -m tests.swarm.programs.shadowed_peer train ...        SHADOW=<folder> in the environment

Before a swap it saves the contribution, after a merge the mean. It changes nothing. See tests/swarm/support/shadow.py.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from peer.commands.cli import main
from peer.exchange.pair.blocking import PairExchange
from peer.rounds.contribution import Averaged, Contribution
from peer.rounds.types import Group, Outcome

honest = PairExchange.average


def average(self: PairExchange, contribution: Contribution, group: Group) -> Averaged:
    folder, name = Path(os.environ["SHADOW"]), f"{time.time_ns()}"
    own = torch.empty(contribution.numel)
    contribution.read(0, own)
    if group.links:
        np.save(folder / f"{name}-own-{group.tokens}.npy", own.numpy())
    averaged = honest(self, contribution, group)
    if averaged.outcome is Outcome.MERGED:
        np.save(folder / f"{name}-mean.npy", averaged.mean.numpy())
        row = {"time": int(name), "own": f"{name}-own-{group.tokens}.npy", "mean": f"{name}-mean.npy"}
        with (folder / "merges.jsonl").open("a") as file:
            file.write(json.dumps({**row, "partner": group.links[0].name, "clipped": bool(averaged.detail)}) + "\n")
    return averaged


if __name__ == "__main__":
    PairExchange.average = average  # type: ignore[method-assign]
    main()
