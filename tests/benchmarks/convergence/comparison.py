"""The methods compared at equal tokens and equal bytes, on stdlib text, each with settings from a sweep.

python -m tests.benchmarks.convergence [--quick] [--json FILE]      the comparison
python -m tests.benchmarks.convergence --sweep STAGE --json FILE    one stage of the sweep, see cases.py

Every run is a simulation with the peer's own inner loop and outer methods (``noloco-peer simulate``), one process per
core. Runs in FILE are not repeated, so an interrupted benchmark can be continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.convergence.cases import STAGES, Case, comparison, quick_comparison
from tests.benchmarks.convergence.plot import plot

Row = dict[str, Any]


def run_one(case: Case) -> Row:
    """One simulation, in a separate process."""
    from peer.commands.simulate.options import Method, Options
    from peer.commands.simulate.simulation import Simulation

    options = Options(
        replicas=case.replicas,
        method=Method(case.method),
        drop=case.drop,
        swap_steps=case.overlap or 1,
    )
    summary = Simulation(case.config(), options).run(lambda line: None)
    swarm, curves = summary["swarm"], summary["curves"]
    kept = ("tokens", "val_loss_mean", "val_loss_worst", "val_loss_averaged_model", "spread", "wall_seconds")
    return {
        "label": case.label,
        "replicas": case.replicas,
        "seed": case.seed,
        **{key: swarm[key] for key in kept},
        "bytes_per_peer": swarm["bytes_sent"] // case.replicas,
        "curve": [[row["tokens"], round(row["val_loss_mean"], 5), row["spread"]] for row in curves],
    }


def run_all(cases: Sequence[Case], known: Known, at_once: int | None = None) -> list[Row]:
    """Rows of ``cases`` in their order; those that are known are not repeated. ``at_once``: one a core by default."""
    by_key = {case.key: case for case in cases}
    known.run_all(run_one, by_key, at_once, lambda row: f"{row['val_loss_mean']:.4f} in {row['wall_seconds']:.0f} s")
    return [known.found[case.key] for case in cases]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over the seeds, by label; the keys of the goals hold the figures with 8 replicas."""
    table: dict[str, Row] = {}
    for name in dict.fromkeys(name_of(row) for row in rows):
        same = [row for row in rows if name_of(row) == name]
        keys = ("val_loss_mean", "val_loss_worst", "val_loss_averaged_model", "spread", "bytes_per_peer", "tokens")
        table[name] = {key: mean(row[key] for row in same) for key in keys}
        table[name] |= {"seeds": len(same), "replicas": same[0]["replicas"], "label": same[0]["label"]}
    eight = {row["label"]: row for row in table.values() if row["replicas"] == 8}
    eight.pop("noloco_h50_drop30")
    return {
        "val_loss": {label: row["val_loss_mean"] for label, row in eight.items()},
        "bytes_per_peer": {label: row["bytes_per_peer"] for label, row in eight.items()},
        "drop30_ratio": drop_ratio([row for row in rows if row["replicas"] == 8]),
        "table": table,
    }


def drop_ratio(rows: Sequence[Row]) -> float:
    """Loss with dropped swaps divided by loss without, for the same seeds."""
    loss = {(row["label"], row["seed"]): row["val_loss_mean"] for row in rows}
    seeds = [seed for label, seed in loss if label == "noloco_h50_drop30"]
    return mean(loss["noloco_h50_drop30", seed] / loss["noloco_h50", seed] for seed in seeds)


def name_of(row: Row) -> str:
    return f"{row['label']} N={row['replicas']}"


def in_words(result: Row) -> str:
    loss = result["val_loss"]
    return (
        f"validation loss at equal tokens, 8 replicas: NoLoCo H 50 {loss['noloco_h50']:.3f}, H 25 "
        f"{loss['noloco_h25']:.3f}; DiLoCo H 50 {loss['diloco_h50']:.3f}, H 100 {loss['diloco_h100']:.3f}; decoupled "
        f"{loss['decoupled']:.3f}; no exchange {loss['local']:.3f}; data parallel {loss['ddp']:.3f}; "
        f"30% of the swaps dropped: {result['drop30_ratio'] - 1:+.2%}"
    )


def main() -> None:
    parser = command_line("the methods compared at equal tokens and equal bytes")
    parser.add_argument("--sweep", choices=list(STAGES), help="run a stage of the sweep instead")
    args = parse(parser)
    known = Known("convergence", args)
    if args.sweep:
        cases = STAGES[args.sweep]()
        by_key = zip((case.key for case in cases), run_all(cases, known), strict=True)
        for key, row in sorted(by_key, key=lambda it: it[1]["val_loss_mean"]):
            print(f"{row['val_loss_mean']:.4f} (averaged {row['val_loss_averaged_model']:.4f})  {key}")
        return
    rows = run_all(quick_comparison() if args.quick else comparison(), known)
    result = figures(rows)
    if args.json:
        plot(rows, args.json.with_suffix(".png"))
    goals = {"30% dropped swaps cost at most 2% of loss": result["drop30_ratio"] <= 1.02}
    finish("convergence", result, in_words(result), args, goals)
