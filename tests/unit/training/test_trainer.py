"""What the trainer does with the report of an inner phase."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peer.errors import RunError
from peer.training.trainer import Trainer
from tests.unit import parts


def account(poison: float, *, at: int, steps: int) -> None:
    """Train for some steps, and give the report to a trainer. ``poison`` is added to the gradients of step ``at``."""
    state, seen = parts.peer_state(), 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return gradient + poison if seen == at else gradient

    next(state.inner.model.parameters()).register_hook(hook)
    trainer, member = object.__new__(Trainer), Mock()
    member.presence.failure = ""
    trainer.member, trainer.inner, trainer.counters = member, state.inner, state.counters
    trainer.phase_length = Mock(time_up=False)
    trainer.account(state.inner.run(state.stream.take(steps)))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_broken_weights_end_the_run_before_anybody_gets_them(poison: float) -> None:
    """The loss of the last step was computed before its gradients broke the weights."""
    with pytest.raises(RunError, match=r"^the norm of the gradients is (nan|inf) at step 3; lower run\.inner"):
        account(poison, at=3, steps=3)
    with pytest.raises(RunError, match=r"^the training loss is nan at step 3; lower run\.inner"):
        account(poison, at=2, steps=3)
    account(0.0, at=3, steps=3)
