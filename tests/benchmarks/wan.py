"""Methods compared by real peers on a slow network: who waits how long, sends how much and learns what.

python -m tests.benchmarks.wan [--quick] [--json FILE]

Each peer is a host of its own in the network laboratory (tests/netlab), the last one runs at half speed. All methods
train the same model on the same text for the same number of steps: the demo's model behind 10 Mbit/s up, 50 down and
60 ms, and one of 21 million parameters behind 25 Mbit/s up. Beside ours, on the former, hivemind's own Optimizer and
torchft's DiLoCo (``pip install torchft==0.2.0``; left out where it is not). Further, the goodput of a swap and the
time from a boundary to the partner. Runs that FILE has in its ``.runs.json`` are not made again, so what was
interrupted goes on.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import model, settings
from tests.benchmarks import wan_goodput, wan_match, wan_others, wan_swarm
from tests.benchmarks.common import finish, options
from tests.benchmarks.wan_plot import plot
from tests.benchmarks.wan_swarm import Job
from tests.netlab.plan import Access, Path_, Plan, load

OURS = {
    "noloco": ("run.exchange.overlap=false", "run.exchange.codec=none"),
    "noloco_int4": ("run.exchange.overlap=false", "run.exchange.codec=int4"),
    "noloco_overlap": ("run.exchange.overlap=true", "run.exchange.codec=int4"),
}
OTHERS = {"torchft_diloco": "torchft", "hivemind_optimizer": "hivemind"}
BIG = ("hidden_size=384", "intermediate_size=1024", "layers=12", "heads=6")
PATIENCE = 420.0  # seconds for a library that is not ours
TARGET = 1.02  # of the highest last loss: all methods come to it


@dataclass(frozen=True)
class Stage:
    """One model on one network. NoLoCo swaps after ``h`` steps, groups of everyone after ``2 h``: equal bytes."""

    name: str
    plan: Plan
    sets: tuple[str, ...]
    peers: int
    steps: int
    h: int
    seconds: float
    others: bool = True  # beside ours

    def jobs(self) -> list[Job]:
        common = (f"run.steps={self.steps}", "run.inner.warmup_steps=20", "run.evaluation.every_rounds=1000")
        common += ("run.evaluation.batches=4", "run.exchange.timeout=120", *self.sets)
        others = OTHERS if self.others else ()
        once, twice = (*common, f"run.inner_steps={self.h}"), (*common, f"run.inner_steps={2 * self.h}")
        demo, everyone = "configs/demo.yaml", "configs/demo-diloco.yaml"
        jobs = [Job(name, demo, (*once, *it), self.peers, self.seconds, self.h) for name, it in OURS.items()]
        return [
            *jobs,
            Job("diloco", everyone, twice, self.peers, self.seconds, 2 * self.h),
            *(Job(name, demo, twice, self.peers, min(self.seconds, PATIENCE), 2 * self.h) for name in others),
        ]

    def parameters(self) -> int:
        run = settings.load(Path("configs/demo.yaml"), list(self.sets)).run
        return model.parameters_of(run.model, sequence_length=run.data.sequence_length)


def stages(*, quick: bool) -> list[Stage]:
    small = ("run.batch_size=4",)
    if quick:
        return [Stage("demo", load("home"), small, peers=3, steps=60, h=10, seconds=120.0)]
    faster = Plan(access=Access(up_mbit=25, down_mbit=50), path=Path_(rtt_ms=60))
    big = ("run.batch_size=1", "run.data.sequence_length=64", *(f"run.model.{it}" for it in BIG))
    return [
        Stage("demo", load("home"), small, peers=8, steps=240, h=20, seconds=900.0),
        Stage("21M", faster, big, peers=8, steps=40, h=10, seconds=1200.0, others=False),
    ]


def run_one(stage: Stage, job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"wan-{job.name}-") as folder:
        if job.name in OTHERS:
            return wan_others.run(OTHERS[job.name], stage.plan, job, Path(folder))
        return wan_swarm.run(stage.plan, job, Path(folder))


def runs(stage: Stage, known: dict[str, Any], file: Path | None) -> dict[str, dict[str, Any]]:
    """Each method's figures; a library that fails is left out and said."""
    found = known.setdefault(stage.name, {})
    for job in stage.jobs():
        library = OTHERS.get(job.name)
        if job.name in found or (library and importlib.util.find_spec(library) is None):
            continue
        try:
            found[job.name] = run_one(stage, job)
        except RuntimeError as error:
            if library is None:
                raise
            print(f"{stage.name} {job.name}: {error}", flush=True)
            continue
        words = {key: value for key, value in found[job.name].items() if key != "losses"}
        print(
            f"{stage.name} {job.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in words.items()), flush=True
        )
        if file is not None:
            file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    time_to_target(found)
    return found


def time_to_target(found: dict[str, dict[str, Any]]) -> None:
    """Adds to each run when the mean of the peers' training losses had come to what all methods reach."""
    target = TARGET * max(run["losses"][-1][1] for run in found.values())
    for run in found.values():
        run["seconds_to_target"] = next(seconds for seconds, loss in run["losses"] if loss <= target)
        run["target"] = target


def figures(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    keys = ("idle_share", "val_loss", "bytes_per_round", "seconds_to_target")
    return {key: {name: run[key] for name, run in found.items()} for key in keys}


def main() -> None:
    args = options("methods compared by real peers on a slow network")
    file = args.json.with_suffix(".runs.json") if args.json else None
    known = json.loads(file.read_text()) if file and file.exists() else {}
    every = stages(quick=args.quick)
    found = {stage.name: runs(stage, known, file) for stage in every}
    goodput = wan_goodput.measure(quick=args.quick)
    print(f"goodput: {goodput}", flush=True)
    match = wan_match.measure((4, 8), 4) if args.quick else wan_match.measure((4, 8, 24), 8)
    print(f"match: {match}", flush=True)
    result = {
        **figures(found["demo"]),
        "parameters": every[0].parameters(),
        "goodput_share": goodput,
        **match,
        "stages": {it.name: {"parameters": it.parameters(), **figures(found[it.name])} for it in every},
        "runs": found,
    }
    if args.json:
        plot(found, args.json.with_suffix(".png"))
    idle = result["idle_share"]
    words = (
        f"idle share on 10 Mbit/s with a straggler: NoLoCo {idle['noloco']:.1%}, int4 {idle['noloco_int4']:.1%}, "
        f"overlapped int4 {idle['noloco_overlap']:.2%}, DiLoCo {idle['diloco']:.1%}; a swap gets "
        f"{goodput['link_100mbit']:.0%} of 100 Mbit/s and {goodput['loopback']:.0%} of a bare stream on loopback"
    )
    finish("wan", result, words, args.json)


if __name__ == "__main__":
    main()
