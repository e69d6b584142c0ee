"""Fine-tuning of the downstream check: plain AdamW in one process, with the loss on the answers only.

Each start gets the learning rate that suits it best by examples which are neither learnt nor tested, so that none is
better only because the rate was chosen for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.downstream_set import IGNORED, Example, Task, tensors

BATCH = 32
TESTED_AT_ONCE = 200
RATES = (1e-3, 3e-3, 6e-3)


@dataclass(frozen=True)
class Tuning:
    """The learning rate goes up over a tenth of the steps and then down to zero."""

    learning_rate: float
    epochs: int = 8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Score:
    """Of held-out examples: nats an answer, and the share that greedy decoding answers exactly."""

    loss: float
    exact: float


def best_tuned(network: nn.Module, task: Task, seed: int) -> tuple[Score, float]:
    """On the test, of the learning rate with the least loss on ``task.choice``; and this rate. Trains copies."""
    tuned = {rate: deepcopy(network) for rate in RATES}
    for rate, own in tuned.items():
        fine_tune(own, task.train, Tuning(rate), seed)
    best = min(RATES, key=lambda rate: score(tuned[rate], task.choice).loss)
    return score(tuned[best], task.test), best


def fine_tune(network: nn.Module, examples: list[Example], tuning: Tuning, seed: int) -> None:
    """Train ``network`` in place; the order of the examples comes from ``seed``."""
    steps = tuning.epochs * math.ceil(len(examples) / BATCH)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=tuning.learning_rate, betas=(0.9, 0.95), weight_decay=tuning.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    network.train()
    for inputs, targets in _batches(examples, tuning.epochs, seed):
        losses, _ = answered(network, inputs, targets)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


@torch.no_grad()
def score(network: nn.Module, examples: list[Example]) -> Score:
    """The model as it is, on ``examples``."""
    network.eval()
    losses, right = [], []
    for start in range(0, len(examples), TESTED_AT_ONCE):
        loss, exact = answered(network, *tensors(examples[start : start + TESTED_AT_ONCE]))
        losses.append(loss)
        right.append(exact)
    return Score(float(torch.cat(losses).mean()), float(torch.cat(right).float().mean()))


def answered(network: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each example: the loss of its answer, and whether greedy decoding would give exactly this answer.

    It would where each of its bytes is the most likely one behind the right ones before it, so one pass tells.
    """
    logits = network(input_ids=inputs).logits.float()
    loss = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    right = (logits.argmax(-1) == targets) | (targets == IGNORED)
    return loss.sum(1), right.all(1)


def _share(step: int, steps: int) -> float:
    """Of the peak learning rate."""
    rising = max(1, steps // 10)
    return (step + 1) / rising if step < rising else (steps - step) / (steps - rising)


def _batches(examples: list[Example], epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(examples), generator=chance).tolist()
        for start in range(0, len(order), BATCH):
            yield tensors([examples[index] for index in order[start : start + BATCH]])
