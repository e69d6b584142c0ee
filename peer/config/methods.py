"""The types of ``run.outer``: one for each method, with its defaults."""

from __future__ import annotations

import warnings
from math import ceil, log, sqrt
from typing import Literal

from pydantic import Field, model_validator

from peer.config.fields import Fraction, Positive, Section


class NoLoCoConfig(Section):
    """NoLoCo (arXiv 2506.10911): groups of two. α momentum, β outer learning rate, γ weight averaging.

    The defaults are those of our sweep (tests/benchmarks/README.md) with γ = 1 − α², where replicas differ least. The
    paper has 0.5, 0.7, 0.7: the same step β / (1 − α) in the long run.
    """

    name: Literal["noloco"] = "noloco"
    alpha: float = Field(default=0.3, ge=0, lt=1)
    beta: Positive = 1.0
    gamma: Positive = 0.91

    @model_validator(mode="after")
    def _stable(self) -> NoLoCoConfig:
        upper = 2 * (1 - self.alpha**2)
        if self.gamma >= upper:
            raise ValueError(
                f"gamma {self.gamma:g} makes the replicas diverge: with alpha {self.alpha:g} "
                f"it must be in 0 < gamma < 2(1 - alpha^2) = {upper:g}"
            )
        low, high = self.alpha, sqrt(2 + self.alpha**2)
        if not low < self.gamma < high:
            said = f"run.outer.gamma {self.gamma:g} is outside the paper's range {low:g} < gamma < {high:.3g}"
            warnings.warn(said, stacklevel=2)
        return self


class DiLoCoConfig(Section):
    """DiLoCo (arXiv 2311.08105): one group of all peers, SGD with momentum on the mean pseudo-gradient."""

    name: Literal["diloco"]
    learning_rate: Positive = 0.7
    momentum: float = Field(default=0.5, ge=0, lt=1)  # the paper has 0.9, for many more rounds
    nesterov: bool = True  # look-ahead as in torch's SGD(nesterov=True); false: heavy ball, as NoLoCo's authors compare


class DecoupledConfig(Section):
    """Decoupled momentum (arXiv 2510.03371): all peers share the largest DCT coefficients of their momentum only."""

    name: Literal["decoupled"]
    learning_rate: Positive = 0.7
    momentum: float = Field(default=0.5, ge=0, lt=1)  # the authors have 0.9 to 0.95
    variant: Literal["replace", "add"] = "replace"  # add: the authors' code
    chunk: int = Field(default=64, ge=8, le=256)  # side of a chunk; a position in a chunk fits 16 bits
    density: Fraction = Field(default=1 / 128, gt=0)  # share of a chunk's coefficients that is sent

    @model_validator(mode="after")
    def _bounded(self) -> DecoupledConfig:
        if self.variant == "add" and self.momentum > 0.5:  # see outer/decoupled.py
            peers = ceil(log(2 * self.momentum - 1, self.momentum)) - 1
            said = f"run.outer.momentum {self.momentum:g} with variant add may grow without an end, among {peers} peers"
            warnings.warn(f"{said} or more; set variant: replace", stacklevel=2)
        return self


class LocalConfig(Section):
    """No exchange: the control."""

    name: Literal["local"]
