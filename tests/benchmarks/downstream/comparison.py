"""The effect of pre-training on fine-tuning: data parallel, DiLoCo and NoLoCo, then the same AdamW.

python -m tests.benchmarks.downstream [--quick] [--json FILE] [--workers N] [--seeds 0 1 2]

Pre-training is a simulation of 4 replicas on the standard library (246,336 parameters, 500 steps: 4.2 tokens a
parameter), with the settings of convergence/cases.py. Every model is then fine-tuned to choose the right one of four
ends for a cut text (questions.py). "What happens when nanochat meets DiLoCo?" (arXiv 2511.13761) found DiLoCo's loss
competitive and its benchmarks after fine-tuning worse. One control has fresh weights. A second control shows which
differences follow from the loss: data parallel, stopped early at DiLoCo's loss. Runs in FILE are not repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from peer.data import open
from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.convergence.cases import CHOSEN, SMALL, Case
from tests.benchmarks.downstream.questions import ANSWERS, make

REPLICAS = 4
STEPS, EARLY = 500, 250  # of each replica; EARLY: data parallel reaches DiLoCo's loss
SEEDS = (0, 1, 2)  # sizes and rates were chosen with other seeds
LEARN, TEST = 300, 1400  # numbers of questions
FRESH, DDP, DDP_EARLY, DILOCO = "fresh weights", "ddp", "ddp, fewer steps", "diloco H 50"
NOLOCO, NOLOCO_ONE = "noloco H 25, average", "noloco H 25, one replica"
STARTS = (FRESH, DDP_EARLY, DDP, DILOCO, NOLOCO, NOLOCO_ONE)
ONE_OF_SEVERAL = {NOLOCO: NOLOCO_ONE}  # methods whose replicas differ: one replica is a second start

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One pre-training and the fine-tunings that start from it. ``case.steps`` 0: no pre-training."""

    case: Case
    learn: int
    test: int

    @property
    def key(self) -> str:
        case = self.case
        return f"{case.label} N={case.replicas} steps={case.steps} seed={case.seed} learn={self.learn} test={self.test}"


def jobs(seeds: Sequence[int], *, quick: bool) -> list[Job]:
    """Ordered by seed, so that an interrupted benchmark has complete seeds."""
    chosen = {case.label: case for case in CHOSEN}
    steps, early, test = (60, 30, 200) if quick else (STEPS, EARLY, TEST)
    cases = [
        replace(chosen["ddp"], label=FRESH, steps=0),
        replace(chosen["ddp"], label=DDP, steps=steps),
        replace(chosen["diloco_h50"], label=DILOCO, steps=steps),
        replace(chosen["noloco_h25"], label=NOLOCO, steps=steps),
        replace(chosen["ddp"], label=DDP_EARLY, steps=early),
    ]
    return [Job(replace(case, seed=seed, replicas=REPLICAS), LEARN, test) for seed in seeds for case in cases]


def run_one(job: Job) -> Row:
    """``rows``: one per start. Runs in a separate process on one core."""
    from peer.data import corpus
    from peer.replica.inner_loop import mean_loss
    from tests.benchmarks.downstream.tuning import best_tuned, score

    torch.set_num_threads(1)
    run = job.case.config().run if job.case.steps else replace(job.case, steps=1).config().run
    text = corpus.load(run.data)
    task = make(text.in_memory, text.validation, learn=job.learn, test=job.test, seed=job.case.seed)
    validation = open.validation(run, text.validation)
    rows = []
    for start, network in starts(job.case):
        val_loss = mean_loss(network, validation, torch.device("cpu"))
        before = score(network, task.test).right
        tuned, rate = best_tuned(network, task, job.case.seed)
        rows.append({"start": start, "seed": job.case.seed, "val_loss": val_loss, "before": before})
        rows[-1] |= {**asdict(tuned), "rate": rate, "learnt": len(task.train), "tested": len(task.test)}
    return {"rows": rows}


def starts(case: Case) -> Iterator[tuple[str, nn.Module]]:
    """The models of a pre-training: the average of the replicas, and the first replica if they differ."""
    from peer.commands.simulate.options import Method, Options
    from peer.commands.simulate.simulation import Simulation
    from peer.config.schema import EvaluationConfig, RunConfig
    from peer.outer.slow_weights import SlowWeights
    from peer.replica import model

    network = model.build(RunConfig(model=SMALL.model, seed=case.seed))
    if not case.steps:
        yield case.label, network
        return
    config = case.config()
    seldom = EvaluationConfig(every_rounds=case.steps, batches=1)  # the curves are not used
    config = config.model_copy(update={"run": config.run.model_copy(update={"evaluation": seldom})})
    simulation = Simulation(config, Options(replicas=case.replicas, method=Method(case.method)))
    simulation.run(lambda line: None)
    weights = [parameters_to_vector(it.state.inner.model.parameters()).detach() for it in simulation.replicas]
    found = [(case.label, torch.stack(weights).mean(0))]
    if case.label in ONE_OF_SEVERAL:
        found.append((ONE_OF_SEVERAL[case.label], weights[0]))
    for label, flat in found:
        own = deepcopy(network)
        slow = SlowWeights(own.named_parameters())
        slow.phi.copy_(flat)
        slow.write_fast()
        yield label, own


def run_all(todo: list[Job], known: Known, workers: int) -> list[Row]:
    """Rows of all jobs; those in ``known`` are not repeated."""
    found = known.run_all(run_one, {job.key: job for job in todo}, workers, shown)
    return [row for each in found for row in each["rows"]]


def shown(found: Row) -> str:
    starts = (
        f"{row['start']}: {row['right']:.1%} right, {row['loss']:.4f} nats a byte at {row['rate']:g}"
        for row in found["rows"]
    )
    return "; ".join(starts)


def figures(rows: list[Row]) -> Row:
    """By start: mean and standard deviation over the seeds, and the differences to other starts of the same seed."""
    by_start = {start: [row for row in rows if row["start"] == start] for start in STARTS}
    table = {}
    for start, same in by_start.items():
        table[start] = {"seeds": len(same)}
        for key in ("val_loss", "before", "right", "loss"):
            table[start][key], table[start][f"{key}_spread"] = _mean_and_spread([row[key] for row in same])
    pairs = [(DILOCO, DDP), (NOLOCO, DDP), (DILOCO, DDP_EARLY), (NOLOCO, DDP_EARLY), (NOLOCO, DILOCO)]
    pairs.append((NOLOCO_ONE, NOLOCO))
    return {
        "table": table,
        "differences": {f"{one} - {two}": _difference(by_start[one], by_start[two]) for one, two in pairs},
        **{key: rows[0][key] for key in ("learnt", "tested")},
    }


def _difference(one: list[Row], two: list[Row]) -> Row:
    """``each``: by seed, so with the same fresh weights, text and order of examples."""
    found: Row = {}
    for key in ("val_loss", "right", "loss"):
        each = [a[key] - b[key] for a, b in zip(one, two, strict=True)]
        found[key], found[f"{key}_spread"] = _mean_and_spread(each)
        found[f"{key}_each"] = each
    return found


def _mean_and_spread(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def in_words(result: Row) -> str:
    right = (f"{start} {row['right']:.1%} ± {row['right_spread']:.1%}" for start, row in result["table"].items())
    return f"right after fine-tuning (chance: {1 / ANSWERS:.0%}): {'; '.join(right)}"


def main() -> None:
    parser = command_line("pre-training by ddp, diloco and noloco, compared after the same fine-tuning")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes with one thread each")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}, --quick: {SEEDS[0]}")
    args = parse(parser)
    seeds = args.seeds or (SEEDS[:1] if args.quick else SEEDS)
    result = figures(run_all(jobs(seeds, quick=args.quick), Known("downstream", args), args.workers))
    finish("downstream", result, in_words(result), args)
