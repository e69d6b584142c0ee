"""Inner steps of models whose arithmetic is too large for this machine: they take their set time and move the weights.

There are no gradients, no moments and no loss. What a swap has to carry is there in full: each inner phase moves every
weight by about as far as AdamW does, each peer's in its own directions.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.wan.pacer import Paced

RUN = 1024  # neighbouring elements that move together


class Drifting(Paced):
    """A step moves one of ``H`` parts of each tensor by normal noise of the size that ``H`` steps of AdamW have."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        config = arguments[1]
        self._phase = config.run.inner_steps
        self._nothing_learned = torch.tensor(math.log(config.run.model.vocabulary))
        self._random = torch.Generator().manual_seed(os.getpid())

    @torch.no_grad()
    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        self.pacer.begin()
        for parameter in self._parameters:
            flat = parameter.view(-1)
            whole = flat.numel() - flat.numel() % (self._phase * RUN)
            part = flat[:whole].view(-1, self._phase, RUN)[:, self.step % self._phase]
            part.add_(torch.randn(part.shape, generator=self._random), alpha=rate * math.sqrt(self._phase))
            rest = flat[whole:]
            rest.add_(torch.randn(rest.shape, generator=self._random), alpha=rate)
        self.pacer.end()
        self.pacer.losses.append(float(self._nothing_learned))
        return self._nothing_learned, torch.tensor(1.0)
