"""The stages of the wan benchmark: each has one model on one network, and a job for each method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.config import load as settings
from peer.replica import model
from tests.benchmarks.wan.swarm import Job
from tests.netlab.plan import Access, Path_, Plan, load

OURS = {
    "noloco": ("run.exchange.overlap=false", "run.exchange.codec=none"),
    "noloco_int4": ("run.exchange.overlap=false", "run.exchange.codec=int4"),
    "noloco_overlap": ("run.exchange.overlap=true", "run.exchange.codec=int4"),
}
OTHERS = {"torchft_diloco": "torchft", "hivemind_optimizer": "hivemind"}
BIG = ("hidden_size=384", "intermediate_size=1024", "layers=12", "heads=6")
PATIENCE = 420.0  # seconds for another library


@dataclass(frozen=True)
class Stage:
    """One model on one network. NoLoCo swaps after ``h`` steps, groups of all peers average after ``2 h``: equal bytes.

    ``pace``: as in :class:`Job`; only our methods can be paced.
    """

    name: str
    plan: Plan
    sets: tuple[str, ...]
    peers: int
    steps: int
    h: int
    seconds: float
    methods: tuple[str, ...] = (*OURS, "diloco", *OTHERS)
    pace: float = 0.0

    def jobs(self) -> list[Job]:
        common = (f"run.steps={self.steps}", "run.inner.warmup_steps=20", "run.evaluation.every_rounds=1000")
        common += ("run.evaluation.batches=4", *self.sets)
        once, twice = (*common, f"run.inner_steps={self.h}"), (*common, f"run.inner_steps={2 * self.h}")
        demo, everyone = "configs/demo.yaml", "configs/demo-diloco.yaml"
        jobs = [
            *(Job(name, demo, (*once, *it), self.peers, self.seconds, self.h, self.pace) for name, it in OURS.items()),
            Job("diloco", everyone, twice, self.peers, self.seconds, 2 * self.h, self.pace),
            *(Job(name, demo, twice, self.peers, min(self.seconds, PATIENCE), 2 * self.h) for name in OTHERS),
        ]
        return [job for job in jobs if job.name in self.methods]

    def parameters(self) -> int:
        run = settings.load(Path("configs/demo.yaml"), list(self.sets)).run
        return model.parameters_of(run)


def stages(*, quick: bool) -> list[Stage]:
    small, light = ("run.batch_size=4",), ("run.batch_size=2",)  # light: paced peers leave the cores idle time
    waiting = ("noloco", "diloco")
    if quick:
        return [
            Stage("demo", load("home"), small, peers=3, steps=60, h=10, seconds=120.0),
            Stage("eu", load("eu"), light, peers=3, steps=30, h=5, seconds=120.0, methods=waiting, pace=0.25),
        ]
    faster = Plan(access=Access(up_mbit=25, down_mbit=50), path=Path_(rtt_ms=60))
    big = ("run.batch_size=1", "run.data.sequence_length=64", *(f"run.model.{it}" for it in BIG))
    return [
        Stage("demo", load("home"), small, peers=8, steps=240, h=20, seconds=900.0),
        Stage("21M", faster, big, peers=8, steps=40, h=10, seconds=1200.0, methods=(*OURS, "diloco")),
        Stage("eu", load("eu"), light, peers=8, steps=160, h=20, seconds=600.0, methods=waiting, pace=0.7),
    ]
