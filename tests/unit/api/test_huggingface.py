"""The callback of a Hugging Face ``Trainer``: the loss of a step, and when it leaves."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from peer.api.huggingface import OuterLoopCallback

NOTHING: Any = None


def test_a_trainer_that_loads_its_best_weights_at_its_end_has_left_before() -> None:
    """The rest of the running swap was mixed into them."""
    member, outer = OuterLoopCallback(run="a"), Mock()
    member.outer = outer
    member.on_log(NOTHING, NOTHING, NOTHING, logs={"loss": 1.5})
    member.on_log(NOTHING, NOTHING, NOTHING, logs={"train_loss": 1.4})  # a program's own line
    assert member._loss() == 1.5 and not outer.close.called
    member.on_log(NOTHING, NOTHING, NOTHING, logs={"train_loss": 1.2, "total_flos": 3.0})  # then it loads them
    assert outer.close.called


@pytest.mark.parametrize(("keywords", "loss"), [({"num_items_in_batch": 7}, 6.0), ({}, 3.0)])
def test_the_loss_of_a_step_is_that_of_its_batches(keywords: dict[str, Any], loss: float) -> None:
    """The trainer says it every ``logging_steps`` only, so that no merge was ever judged."""
    member, model = OuterLoopCallback(run="a"), nn.Linear(1, 1)

    def forward(value: float, *, gradient: bool = True) -> None:
        output = CausalLMOutput(loss=torch.tensor(value, requires_grad=gradient))  # type: ignore[arg-type]
        member._on_forward(model, (), keywords, output)

    forward(2.0)
    forward(4.0)
    forward(50.0, gradient=False)
    model.eval()
    forward(60.0)
    assert float(member._loss() or 0) == loss
    member._on_forward(model.train(), (), keywords, (torch.ones(1),))
    assert member._loss() is None
