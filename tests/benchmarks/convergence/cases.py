"""The runs of the convergence benchmark: sizes, the sweep of each method's settings, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peer.config.schema import (
    CodecName,
    Config,
    EvaluationConfig,
    ExchangeConfig,
    InnerConfig,
    LlamaModel,
    RunConfig,
    StdlibData,
)


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    name: str
    model: LlamaModel
    sequence_length: int


SMALL = Size("", LlamaModel(hidden_size=96, intermediate_size=256, layers=2, heads=4), 64)  # 246,336 parameters
DEMO = Size("demo", LlamaModel(hidden_size=128, intermediate_size=344, layers=5, heads=4), 128)  # 1,022,464
STEPS = 1250  # of 8 replicas × 512 tokens: 20.8 tokens a parameter
DEMO_STEPS = 1250  # of 8 replicas × 1024 tokens: 10.0 tokens a parameter
SWEEP_STEPS = 650


@dataclass(frozen=True)
class Case:
    """One simulation. ``outer``: ``run.outer`` of a config file. ``steps``: of each replica."""

    label: str
    method: str
    h: int = 50
    lr: float = 3e-3
    outer: dict[str, Any] = field(default_factory=dict)
    replicas: int = 8
    steps: int = STEPS
    seed: int = 0
    drop: float = 0.0
    codec: CodecName = "none"
    optimizer: Literal["adamw", "muon"] = "adamw"
    overlap: int = 0  # inner steps during an overlapped swap; 0: blocking
    size: Size = SMALL

    @property
    def key(self) -> str:
        """The name of the case in the results."""
        outer = ",".join(f"{key}={value}" for key, value in self.outer.items())
        drop = f" drop={self.drop:g}" if self.drop else ""
        more = "".join(f" {key}={value}" for key, value in self._unusual().items())
        swarm = f"N={self.replicas} steps={self.steps} seed={self.seed}"
        return f"{self.method} {outer} H={self.h} lr={self.lr:g} {swarm}{drop}{more}"

    def _unusual(self) -> dict[str, Any]:
        every = {"optimizer": self.optimizer, "codec": self.codec, "overlap": self.overlap, "size": self.size.name}
        return {key: value for key, value in every.items() if value not in ("adamw", "none", 0, "")}

    def config(self) -> Config:
        """The configuration of the run, with about six evaluations."""
        names = {"ddp": "local", "one-worker": "diloco", "averaging": "noloco"}
        outer = {"name": names.get(self.method, self.method), **self.outer}
        if self.method == "averaging":
            outer |= {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
        return Config(
            run=RunConfig(
                name="convergence",
                seed=self.seed,
                steps=self.steps,
                inner_steps=self.h,
                batch_size=8,
                model=self.size.model,
                data=StdlibData(sequence_length=self.size.sequence_length),
                inner=InnerConfig(optimizer=self.optimizer, learning_rate=self.lr, warmup_steps=100),
                exchange=ExchangeConfig(codec=self.codec, overlap=self.overlap > 0),
                outer=outer,  # type: ignore[arg-type]
                evaluation=EvaluationConfig(every_rounds=max(1, round(self.steps / 6 / self.h)), batches=24),
            )
        )


# The results of the sweep. NoLoCo: the paper's α 0.5, β 0.7, γ 0.7 discards 30% of the first and largest changes.
NOLOCO = {"alpha": 0.3, "beta": 1.0, "gamma": 0.91}
PAPER = {"alpha": 0.5, "beta": 0.7, "gamma": 0.7}
DILOCO = {"learning_rate": 0.7, "momentum": 0.5}
DILOCO_100 = {"learning_rate": 1.0, "momentum": 0.5}
DECOUPLED = {"learning_rate": 0.7, "momentum": 0.5}

CHOSEN = [
    Case("noloco_h50", "noloco", 50, outer=NOLOCO),
    Case("diloco_h100", "diloco", 100, outer=DILOCO_100),
    Case("diloco_h50", "diloco", 50, outer=DILOCO),
    Case("noloco_h25", "noloco", 25, outer=NOLOCO),
    Case("decoupled", "decoupled", 50, outer=DECOUPLED),
    Case("local", "local"),
    Case("ddp", "ddp", lr=4e-3),
    Case("noloco_h50_drop30", "noloco", 50, outer=NOLOCO, drop=0.3),
]
CONTROLS = [
    Case("averaging_h50", "averaging"),
    Case("noloco_paper_h50", "noloco", 50, outer=PAPER),
    Case("one_worker", "one-worker", 50, outer=DILOCO),
]


def comparison() -> list[Case]:
    """Two seeds of every case; runs with 16 replicas have the same total of tokens as runs with 8."""
    sixteen = [replace(case, replicas=16, steps=STEPS // 2) for case in CHOSEN[:4]]
    return [replace(case, seed=seed) for case in (*CHOSEN, *CONTROLS, *sixteen) for seed in (0, 1)]


def quick_comparison() -> list[Case]:
    """The same with a tenth of the tokens and one seed: three minutes, too short to rank the methods."""
    return [replace(case, steps=120) for case in CHOSEN]


def lr_sweep() -> list[Case]:
    """The inner learning rate, at half the tokens."""
    methods = [("noloco", {}), ("diloco", DILOCO), ("ddp", {}), ("local", {})]
    rates = (8e-3, 4e-3, 2e-3)
    return [Case("lr", method, lr=lr, outer=outer, steps=SWEEP_STEPS) for lr in rates for method, outer in methods]


def outer_sweep() -> list[Case]:
    """The outer hyper-parameters, at half the tokens and with a learning rate between the two best."""
    noloco50 = [(0.5, 0.7, 0.7), (0.0, 1.0, 1.0), (0.3, 1.0, 0.91), (0.3, 0.7, 0.91), (0.0, 1.3, 1.0)]
    noloco25 = [(0.5, 0.7, 0.7), (0.0, 1.0, 1.0), (0.3, 1.0, 0.91)]
    diloco50 = [(0.7, 0.5), (0.7, 0.9), (1.0, 0.5), (1.0, 0.0)]
    diloco100 = [(0.7, 0.5), (1.0, 0.5), (0.7, 0.9)]
    decoupled = [(0.7, 0.5), (0.7, 0.9), (1.0, 0.5)]
    half = Case("outer", "", steps=SWEEP_STEPS)
    pairs = [(50, it) for it in noloco50] + [(25, it) for it in noloco25]
    groups = [(50, it) for it in diloco50] + [(100, it) for it in diloco100]
    return [
        *(replace(half, method="noloco", h=h, outer={"alpha": a, "beta": b, "gamma": c}) for h, (a, b, c) in pairs),
        *(replace(half, method="diloco", h=h, outer={"learning_rate": a, "momentum": b}) for h, (a, b) in groups),
        *(replace(half, method="decoupled", outer={"learning_rate": a, "momentum": b}) for a, b in decoupled),
    ]


def noloco_sweep() -> list[Case]:
    """NoLoCo's sweep, repeated with the rule that prefers the partner met longest ago and with shorter last phases."""
    both = [(0.5, 0.7, 0.7), (0.0, 1.0, 1.0), (0.2, 1.0, 0.96), (0.3, 1.0, 0.91), (0.4, 1.0, 0.84)]
    grid = [(h, it) for h in (50, 25) for it in both] + [(50, (0.3, 0.85, 0.91)), (50, (0.3, 1.2, 0.91))]
    half = Case("noloco", "noloco", steps=SWEEP_STEPS)
    return [replace(half, h=h, outer={"alpha": a, "beta": b, "gamma": c}) for h, (a, b, c) in grid]


INT8 = Case("noloco_h12_int8", "noloco", 12, outer=NOLOCO, codec="int8")


def optimizer_sweep() -> list[Case]:
    """The learning rate of each inner optimizer, with 4 replicas for 240 steps, which is 2.0 tokens a parameter."""
    short = replace(INT8, label="optimizer", replicas=4, steps=240)
    return [
        *(replace(short, lr=lr) for lr in (1.5e-3, 2e-3, 2.5e-3, 3e-3, 3.5e-3, 4.5e-3, 6e-3)),
        *(replace(short, lr=lr, optimizer="muon") for lr in (3e-3, 6e-3, 9e-3, 12e-3, 24e-3)),
    ]


def optimizers() -> list[Case]:
    """The inner optimizers with the best settings of their sweeps, at a quarter of the tokens: 5.4 a parameter."""
    quarter = replace(INT8, steps=325)
    muon = replace(quarter, label="noloco_muon_h12_int8", optimizer="muon")
    return [quarter, replace(muon, lr=6e-3), replace(muon, lr=12e-3)]


def confirmation() -> list[Case]:
    """The chosen settings on the demo's model, at half the tokens per parameter: 50 minutes a run on one core."""
    return [replace(case, size=DEMO, steps=DEMO_STEPS) for case in CHOSEN if case.label in ("noloco_h25", "diloco_h50")]


def group_codecs() -> list[Case]:
    """DiLoCo with few bits, at a quarter of the tokens: 5.4 a parameter. Of 2 bits a second seed, and the comparison's
    length.
    """
    quarter = Case("", "diloco", outer=DILOCO, steps=325)
    codecs: tuple[CodecName, ...] = ("none", "int8", "int4", "int2")
    first = [replace(quarter, label=f"diloco_h{h}_{it}", h=h, codec=it) for h in (50, 12) for it in codecs]
    long = [Case("diloco_h50_int2_long", "diloco", outer=DILOCO, codec="int2", seed=seed) for seed in (0, 1)]
    return first + [replace(it, seed=1) for it in first if it.codec in ("none", "int2")] + long


def decoupled() -> list[Case]:
    """Both variants of decoupled momentum, with 4 replicas for 240 steps of 2.0 tokens a parameter; three seeds."""
    short = Case("", "decoupled", 12, replicas=4, steps=240)
    tried = [(variant, mu) for mu in (0.5, 0.7) for variant in ("replace", "add")] + [("replace", 0.9)]
    return [
        replace(short, label=f"decoupled_{variant}", outer={"variant": variant, "momentum": mu}, seed=seed)
        for seed in (0, 1, 2)
        for variant, mu in tried
    ]


def limit() -> list[Case]:
    """Data parallel with Muon, which the frontier is held against; of the frontier's rate two seeds."""
    muon = Case("ddp_muon", "ddp", lr=24e-3, optimizer="muon")
    return [replace(muon, lr=lr) for lr in (12e-3, 24e-3, 48e-3)] + [replace(muon, seed=1)]


STAGES: dict[str, Callable[[], list[Case]]] = {
    "lr": lr_sweep,
    "outer": outer_sweep,
    "noloco": noloco_sweep,
    "optimizer": optimizer_sweep,
    "optimizers": optimizers,
    "group_codecs": group_codecs,
    "decoupled": decoupled,
    "limit": limit,
    "confirm": confirmation,
}
