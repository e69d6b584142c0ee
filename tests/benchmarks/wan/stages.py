"""The stages of the wan benchmark (a model on a network, and the set time of an inner step) and its methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.config import load as settings
from peer.config.schema import RunConfig
from peer.replica import model
from tests.netlab.plan import Access, Path_, Plan, load

STRAGGLER = "_straggler"  # at the end of a stage's name: one peer more, the last one, runs at half speed


@dataclass(frozen=True)
class Method:
    """``config``: the files that peers are given. ``inner_steps``: H; NoLoCo swaps twice as often as a group of all
    averages, as an all-reduce moves nearly twice the bytes. ``library``: whose optimizer it is, where it is not ours.
    """

    name: str
    config: tuple[str, ...]
    inner_steps: int | None = None
    overrides: tuple[str, ...] = ()
    library: str = ""
    options: dict[str, Any] = field(default_factory=dict)


DEMO, DILOCO = "configs/demo.yaml", "configs/demo-diloco.yaml"
H, GROUP_H = 25, 50
BEST = {"fragments": 2, "fragment_update_alpha": 0.5}
METHODS = {
    it.name: it
    for it in (
        Method("alone", (DEMO,), H, ("run.outer={name: local}",)),
        Method("noloco_default", (DEMO,), H),
        Method("noloco_paper", (DEMO, "configs/paper.yaml")),
        Method("diloco", (DILOCO,), GROUP_H),
        Method("diloco_fp32", (DILOCO,), GROUP_H, ("run.exchange.codec=none",)),
        Method("torchft_buckets", (DEMO,), GROUP_H, (), "torchft", {"fragments": 1}),
        Method("torchft_best", (DEMO,), GROUP_H, (), "torchft", BEST),
        Method("torchft_h100", (DEMO,), 2 * GROUP_H, (), "torchft", BEST),
        Method("hivemind", (DEMO,), GROUP_H, (), "hivemind", {"matchmaking_time": 5.0, "averaging_timeout": 60.0}),
    )
}


@dataclass(frozen=True)
class Stage:
    """``pace``: seconds of an inner step; the straggler's are twice as long. ``delay``: inner steps in which
    torchft's fragments travel at its best, a third more than their bytes take over the line; in ``cable`` nearly
    all that H gives. ``longer``: times H. ``drift``: the model is too large for this machine's arithmetic
    (drift.py), so no loss is measured, and no library.
    """

    name: str
    plan: Plan
    sets: tuple[str, ...]
    peers: int
    steps: int
    pace: float
    delay: int
    longer: int = 1
    drift: bool = False

    @property
    def straggler(self) -> bool:
        return self.name.endswith(STRAGGLER)

    def paces(self) -> list[float]:
        """By peer."""
        return [self.pace] * (self.peers - 1) + [self.pace * (2 if self.straggler else 1)]

    def overrides(self, method: Method) -> tuple[str, ...]:
        common = (f"run.steps={self.steps}", "run.inner.warmup_steps=20", "run.evaluation.every_rounds=1000")
        common += ("run.evaluation.batches=4", "peer.checkpoint.every_rounds=1000", "peer.threads=1")
        steps = (f"run.inner_steps={self.longer * method.inner_steps}",) if method.inner_steps else ()
        return (*common, *self.sets, *steps, *method.overrides)

    def options(self, method: Method) -> dict[str, Any]:
        if "fragment_update_alpha" not in method.options:
            return method.options
        times = (method.inner_steps or GROUP_H) // GROUP_H
        return {**method.options, "fragment_sync_delay": times * self.delay}

    def run(self, method: Method) -> RunConfig:
        return settings.load([Path(it) for it in method.config], self.overrides(method)).run

    def parameters(self) -> int:
        return model.parameters_of(self.run(METHODS["alone"]))

    def settings(self, method: Method) -> dict[str, Any]:
        """All that a run rests on; a run with others is another measurement."""
        return {
            "stage": self.name,
            "method": method.name,
            "peers": self.peers,
            "steps": self.steps,
            "pace": self.pace,
            "up_mbit": self.plan.access.up_mbit,
            "down_mbit": self.plan.access.down_mbit,
            "rtt_ms": self.plan.path.rtt_ms,
            "parameters": self.parameters(),
            "config": list(method.config),
            "overrides": list(self.overrides(method)),
            "options": self.options(method),
            **({"drift": True} if self.drift else {}),
        }


CABLE = Plan(access=Access(up_mbit=40, down_mbit=200), path=Path_(rtt_ms=30))
LIGHT = ("run.batch_size=1", "run.data.sequence_length=32")
BIG = (*LIGHT, *(f"run.model.{it}" for it in ("hidden_size=384", "intermediate_size=1024", "layers=12", "heads=6")))
FIBRE = Plan(access=Access(up_mbit=100, down_mbit=100), path=Path_(rtt_ms=20))
PAPERS = (  # configs/models/llama-125m.yaml: 309,876,480 parameters
    *LIGHT,
    "run.inner.learning_rate=6e-4",
    *(f"run.model.{it}" for it in ("hidden_size=768", "intermediate_size=3072", "layers=12", "heads=16")),
    *(f"run.model.{it}" for it in ("vocabulary=128002", "tie_embeddings=false")),
)


def stages(*, quick: bool) -> dict[str, Stage]:
    """By name. A step's arithmetic takes about a thirtieth (``home``) or a quarter (``cable``) of its set time.

    Three peers of ``fibre`` take 16 of this machine's 24 GiB, so it has no stage with one more.
    """
    if quick:
        made = [Stage(f"home{kind}", load("home"), LIGHT, 2 + bool(kind), 60, 0.15, 0) for kind in ("", STRAGGLER)]
    else:
        made = [
            Stage(f"{name}{kind}", plan, sets, peers + bool(kind), 400, pace, delay)
            for name, plan, sets, peers, pace, delay in (
                ("home", load("home"), LIGHT, 4, 0.4, 11),
                ("cable", CABLE, BIG, 4, 0.5, 20),
            )
            for kind in ("", STRAGGLER)
        ]
        made.append(Stage("fibre", FIBRE, PAPERS, 3, 400, 1.0, 0, longer=2, drift=True))
    return {it.name: it for it in made}
