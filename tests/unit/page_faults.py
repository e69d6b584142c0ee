"""The parts of a swap in a process of its own: how many pages does the system zero for each?

python -m tests.unit.page_faults

Prints the page faults a part once the memory that parts leave can be used again.
"""

from __future__ import annotations

import resource
from contextlib import suppress

import torch
from torch import nn

from peer.commands import cli
from peer.config.methods import NoLoCoConfig
from peer.outer.noloco import NoLoCo, PartOpening
from peer.outer.slow_weights import SlowWeights
from peer.rounds.contribution import PART, parts

COUNT = 16  # parts, of which all are open at once
SWAPS = 8  # that are counted; before them as many


def swap(method: NoLoCo) -> None:
    opening = PartOpening(method, parts(method.slow.numel))
    opened = list(opening.open(range(COUNT), 1, wait=True))
    for index, own, change in opened:
        method.amend(index * PART, change.sub_(own))


def main() -> None:
    with suppress(SystemExit):
        cli.main(["train", "--config", "nowhere.yaml"])  # it is refused, after what each peer does first
    torch.set_num_threads(1)
    method = NoLoCo(SlowWeights([("weights", nn.Parameter(torch.ones(COUNT * PART)))]), NoLoCoConfig())
    faults = []
    for _ in range(2 * SWAPS):
        swap(method)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print((faults[-1] - faults[-1 - SWAPS]) / (SWAPS * COUNT))


if __name__ == "__main__":
    main()
