"""The cost in loss of overlapped swaps and of codecs with few bits.

python -m tests.benchmarks.overlap [--quick] [--json FILE]

Simulations of NoLoCo (H 50, 8 replicas, 246,336 parameters, 650 steps: 10.8 tokens a parameter, two seeds) with the
peer's own outer step and codecs. Runs in FILE are not repeated.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from tests.benchmarks.common import Known, finish, options
from tests.benchmarks.convergence.cases import NOLOCO, SWEEP_STEPS, Case
from tests.benchmarks.convergence.comparison import run_all

BASE = Case("waited for", "noloco", outer=NOLOCO, steps=SWEEP_STEPS)
CASES = [
    BASE,
    replace(BASE, label="part by part beside 10 steps", overlap=10),
    replace(BASE, label="part by part beside 25 steps", overlap=25),
    replace(BASE, label="int8", codec="int8"),
    replace(BASE, label="int4", codec="int4"),
    replace(BASE, label="int8, part by part beside 10 steps", codec="int8", overlap=10),
    replace(BASE, label="int4, part by part beside 10 steps", codec="int4", overlap=10),
    replace(BASE, label="int4, part by part beside 25 steps", codec="int4", overlap=25),
]


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds by case: loss, its ratio to a blocking fp32 swap with the same seed, bytes."""
    base = {row["seed"]: row for row in rows if row["label"] == BASE.label}
    table = {}
    for case in CASES:
        same = [row for row in rows if row["label"] == case.label]
        if same:
            table[case.label] = {
                "val_loss": mean(row["val_loss_mean"] for row in same),
                "ratio": mean(row["val_loss_mean"] / base[row["seed"]]["val_loss_mean"] for row in same),
                "bytes_ratio": mean(row["bytes_per_peer"] / base[row["seed"]]["bytes_per_peer"] for row in same),
                "seeds": len(same),
            }
    return {"table": table}


def main() -> None:
    args = options("the cost in loss of overlap and of few bits")
    if args.quick:
        cases = [replace(case, steps=100) for case in CASES if case.overlap in (0, 10)]
    else:
        cases = [replace(case, seed=seed) for seed in (0, 1) for case in CASES]
    result = figures(run_all(cases, Known("overlap", args)))
    table = result["table"]
    words = "; ".join(f"{label} {row['ratio'] - 1:+.2%}" for label, row in table.items() if label != BASE.label)
    finish("overlap", result, f"validation loss against a blocking swap: {words}", args)


if __name__ == "__main__":
    main()
