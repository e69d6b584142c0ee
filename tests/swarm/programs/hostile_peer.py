"""A hostile member of the run. It sends a false contribution, or serves false weights to newcomers.

python -m tests.swarm.programs.hostile_peer train ...        in the environment HOSTILE=<one of support/attacks.py>,
                                                             FALSE_DONOR=yes
                                                             or LIE=<one of simulated/harm/lies.py>
Everything else is honest, so other peers meet it like any member.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from peer.commands.cli import main
from peer.rounds.state import State
from peer.training import member
from peer.training.outer_state import OuterState
from peer.training.trainer import Trainer
from tests.simulated.harm import lies
from tests.swarm.support.attacks import Attack, Hostile

honest, train = OuterState.snapshot, Trainer.run


def false(state: OuterState) -> State:
    """A state of noise with the norms of the real one."""
    given = honest(state)
    return replace(given, vectors=[torch.randn_like(it) * it.norm() / len(it) ** 0.5 for it in given.vectors])


def lying(trainer: Trainer) -> object:
    """Trains, with the lie in all that it says from now on."""
    lies.in_state(os.environ["LIE"], trainer.state)
    lies.in_exchange(os.environ["LIE"], trainer)
    return train(trainer)


if __name__ == "__main__":
    if "FALSE_DONOR" in os.environ:
        OuterState.snapshot = false  # type: ignore[method-assign]
    if "HOSTILE" in os.environ:
        member.codec_named = lambda name, numel: Hostile(Attack(os.environ["HOSTILE"]))
    if "LIE" in os.environ:
        Trainer.run = lying  # type: ignore[method-assign]
    main()
