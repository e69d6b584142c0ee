"""The runs of the convergence benchmark: sizes, the sweep that chose each method's settings, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from peer.config import Config, Evaluation, Inner, LlamaModel, Run, StdlibData

MODEL = LlamaModel(hidden_size=96, intermediate_size=256, layers=2, heads=4)  # 246,336 parameters
STEPS_8 = 1300  # of 8 replicas × 512 tokens: 21.6 tokens a parameter
TOKENS_A_STEP = 512


@dataclass(frozen=True)
class Case:
    """One simulation. ``outer``: ``run.outer`` of a config file. ``steps``: of each replica."""

    method: str
    h: int = 50
    lr: float = 8e-3
    outer: dict[str, Any] = field(default_factory=dict)
    replicas: int = 8
    steps: int = STEPS_8
    seed: int = 0
    drop: float = 0.0

    @property
    def key(self) -> str:
        """Names the case in the results."""
        outer = ",".join(f"{key}={value}" for key, value in self.outer.items())
        drop = f" drop={self.drop:g}" if self.drop else ""
        size = f"N={self.replicas} steps={self.steps} seed={self.seed}"
        return f"{self.method} {outer} H={self.h} lr={self.lr:g} {size}{drop}"

    def config(self) -> Config:
        """The configuration of the run, with ten samples on its way."""
        names = {"ddp": "local", "one-worker": "diloco", "averaging": "noloco"}
        outer = {"name": names.get(self.method, self.method), **self.outer}
        if self.method == "averaging":
            outer |= {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
        every = max(1, round(self.steps / 6 / self.h))
        run = Run(
            name="convergence",
            seed=self.seed,
            steps=self.steps,
            inner_steps=self.h,
            batch_size=8,
            model=MODEL,
            data=StdlibData(sequence_length=64),
            inner=Inner(learning_rate=self.lr, warmup_steps=100),
            outer=outer,  # type: ignore[arg-type]
            evaluation=Evaluation(every_rounds=every, batches=24),
        )
        return Config(run=run)


def lr_sweep() -> list[Case]:
    """The inner learning rate, at half the tokens."""
    half = STEPS_8 // 2
    return [
        Case(method, lr=lr, outer=outer, steps=half)
        for lr in (8e-3, 4e-3, 2e-3, 1e-3)
        for method, outer in (
            ("noloco", {}),
            ("diloco", {"learning_rate": 0.7, "momentum": 0.5}),
            ("ddp", {}),
            ("local", {}),
        )
    ]


def outer_sweep() -> list[Case]:
    """The outer hyper-parameters, at half the tokens and the learning rate between the two best."""
    noloco50 = [(0.5, 0.7, 0.7), (0.0, 1.0, 1.0), (0.3, 1.0, 0.91), (0.3, 0.7, 0.91), (0.0, 1.3, 1.0)]
    noloco25 = [(0.5, 0.7, 0.7), (0.0, 1.0, 1.0), (0.3, 1.0, 0.91)]
    diloco50 = [(0.7, 0.5), (0.7, 0.9), (1.0, 0.5), (0.4, 0.9), (1.0, 0.0)]
    diloco100 = [(0.7, 0.5), (1.0, 0.5), (0.7, 0.9)]
    decoupled = [(0.7, 0.5), (0.7, 0.9), (1.0, 0.5)]
    pairs = [(50, it) for it in noloco50] + [(25, it) for it in noloco25]
    groups = [(50, it) for it in diloco50] + [(100, it) for it in diloco100]
    half = Case("", lr=3e-3, steps=STEPS_8 // 2)
    return [
        *(replace(half, method="noloco", h=h, outer={"alpha": a, "beta": b, "gamma": c}) for h, (a, b, c) in pairs),
        *(replace(half, method="diloco", h=h, outer={"learning_rate": a, "momentum": b}) for h, (a, b) in groups),
        *(replace(half, method="decoupled", outer={"learning_rate": a, "momentum": b}) for a, b in decoupled),
    ]


def gossip_sweep() -> list[Case]:
    half = Case("gossip", lr=3e-3, steps=STEPS_8 // 2)
    settings = [
        (25, 0.5, 1.0),
        (25, 0.3, 1.0),
        (50, 0.5, 1.0),
        (25, 0.7, 1.0),
        (50, 0.3, 1.0),
        (50, 0.7, 1.0),
        (50, 0.7, 0.6),
    ]
    return [replace(half, h=h, outer={"alpha": a, "beta": b}) for h, a, b in settings]


__all__ = ["Case", "lr_sweep", "outer_sweep", "replace"]
