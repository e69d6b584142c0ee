"""Fine-tuning of the downstream benchmark: plain AdamW in one process, with the loss on the right answers only.

Each start gets its best learning rate, chosen by separate questions, so that no start gains by a rate chosen for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.downstream.questions import IGNORED, Question, Task, tensors

BATCH = 32
SCORED_AT_ONCE = 200
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Tuning:
    """The learning rate rises over a tenth of the steps, then falls to zero."""

    learning_rate: float
    epochs: int = 4
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Score:
    """``loss``: nats per byte of the right answers. ``right``: share of questions whose right answer has the least."""

    loss: float
    right: float


def best_tuned(network: nn.Module, task: Task, seed: int) -> tuple[Score, float]:
    """The test score with the learning rate of least loss on ``task.choice``, and this rate. Trains copies."""
    tuned = {rate: deepcopy(network) for rate in RATES}
    for rate, own in tuned.items():
        fine_tune(own, task.train, Tuning(rate), seed)
    best = min(RATES, key=lambda rate: score(tuned[rate], task.choice).loss)
    return score(tuned[best], task.test), best


def fine_tune(network: nn.Module, questions: list[Question], tuning: Tuning, seed: int) -> None:
    """Train ``network`` in place; ``seed`` determines the order of the questions."""
    steps = tuning.epochs * math.ceil(len(questions) / BATCH)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=tuning.learning_rate, betas=(0.9, 0.95), weight_decay=tuning.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    network.train()
    for inputs, targets in _batches(questions, tuning.epochs, seed):
        nats(network, inputs, targets).mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


@torch.no_grad()
def score(network: nn.Module, questions: list[Question]) -> Score:
    """Score without training: the model's answer is the one that is most likely per byte."""
    network.eval()
    pairs = [(it.prompt, answer) for it in questions for answer in it.answers]
    pieces = [pairs[start : start + SCORED_AT_ONCE] for start in range(0, len(pairs), SCORED_AT_ONCE)]
    losses = torch.cat([nats(network, *tensors(piece)) for piece in pieces]).view(len(questions), -1)
    right = losses[:, 0] < losses[:, 1:].amin(1)
    return Score(float(losses[:, 0].mean()), float(right.float().mean()))


def nats(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte of each answer, ``[answers]``."""
    logits = network(input_ids=inputs).logits.float()
    loss = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return loss.sum(1) / (targets != IGNORED).sum(1)


def _share(step: int, steps: int) -> float:
    """The share of the peak learning rate."""
    rising = max(1, steps // 10)
    return (step + 1) / rising if step < rising else (steps - step) / (steps - rising)


def _batches(questions: list[Question], epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    pairs = [(it.prompt, it.answers[0]) for it in questions]
    for _ in range(epochs):
        order = torch.randperm(len(pairs), generator=chance).tolist()
        for start in range(0, len(order), BATCH):
            yield tensors([pairs[index] for index in order[start : start + BATCH]])
