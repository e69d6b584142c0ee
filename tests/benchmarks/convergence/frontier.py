"""Loss against bytes: NoLoCo and DiLoCo, each with each inner optimizer, at shares of one number of bytes.

python -m tests.benchmarks.convergence.frontier --tune --json FILE      outer settings and learning rates, short runs
python -m tests.benchmarks.convergence.frontier --json FILE             the frontier, with 8 replicas
python -m tests.benchmarks.convergence.frontier --replicas 16 --json FILE      as many tokens, the settings of 8

The whole is what DiLoCo H 50 sends in fp32. Each method has the H at which int4 sends at most a share of that, its last
swaps included. Runs in FILE are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.convergence.cases import DILOCO, DILOCO_100, NOLOCO, STEPS, Case
from tests.benchmarks.convergence.comparison import Row, run_all

# Bytes a peer by the number of replicas: DiLoCo H 50, fp32, 246,336 parameters, 1,250 and 625 steps
WHOLE = {8: 43_108_800, 16: 24_017_760}
SHARES = (1.0, 0.5, 0.25, 0.0625)
RATES = {"adamw": 3e-3, "muon": 24e-3}  # by --tune and by the sweeps "lr" and "optimizer"


def noloco(alpha: float) -> dict[str, Any]:
    """``run.outer``; γ by α as in the sweeps of cases.py."""
    return {"alpha": alpha, "beta": 1.0, "gamma": round(1 - alpha**2, 4)}


def diloco(learning_rate: float, momentum: float) -> dict[str, Any]:
    """``run.outer``."""
    return {"learning_rate": learning_rate, "momentum": momentum}


# By share of the bytes: H and outer settings
CHOSEN: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "noloco": [(4, noloco(0.1)), (8, noloco(0.1)), (16, noloco(0.2)), (80, NOLOCO)],
    "diloco": [(7, diloco(1.0, 0.2)), (14, diloco(1.0, 0.2)), (27, diloco(1.0, 0.2)), (105, DILOCO_100)],
}
TUNED: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {
    "noloco": [(4, [noloco(it) for it in (0.1, 0.2, 0.3)]), (16, [noloco(it) for it in (0.1, 0.2, 0.3)])],
    "diloco": [
        (7, [diloco(1.0, 0.2), DILOCO, diloco(0.7, 0.2)]),
        (27, [DILOCO, DILOCO_100, diloco(1.0, 0.2)]),
    ],
}


def case(method: str, optimizer: str, h: int, outer: Mapping[str, Any], **changes: Any) -> Case:
    """A run in int4, with 8 replicas if nothing else is said."""
    label = f"{method}_{optimizer}_h{h}_int4"
    lr = changes.pop("lr", RATES[optimizer])
    return Case(label, method, h, lr, dict(outer), codec="int4", optimizer=optimizer, **changes)  # type: ignore[arg-type]


def tuning() -> list[Case]:
    """As many settings of each method: six of AdamW's, four of Muon's, at a quarter of the tokens."""
    short = {"steps": STEPS * 26 // 100}
    adamw = [
        case(method, "adamw", h, outer, **short)
        for method, settings in TUNED.items()
        for h, tried in settings
        for outer in tried
    ]
    middle = [("noloco", 8, noloco(0.1), noloco(0.2)), ("diloco", 14, diloco(1.0, 0.2), DILOCO)]
    muon = [
        case(method, "muon", h, outer, lr=lr, **short)
        for method, h, *tried in middle
        for outer in tried
        for lr in (12e-3, 24e-3)
    ]
    return adamw + muon


def frontier_cases(seeds: Sequence[int] = (0, 1), replicas: int = 8) -> list[Case]:
    """All of a seed before the next."""
    return [
        replace(case(method, optimizer, h, outer), seed=seed, replicas=replicas, steps=8 * STEPS // replicas)
        for seed in seeds
        for optimizer in RATES
        for method, chosen in CHOSEN.items()
        for h, outer in chosen
    ]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over the seeds by label; at each share the least loss of what sends no more."""
    of = {label: [row for row in rows if row["label"] == label] for label in dict.fromkeys(it["label"] for it in rows)}
    loss = {label: mean(row["val_loss_mean"] for row in same) for label, same in of.items()}
    sent = {label: mean(row["bytes_per_peer"] for row in same) for label, same in of.items()}
    whole = WHOLE[rows[0]["replicas"]]
    gaps = [row["val_loss_mean"] / row["val_loss_averaged_model"] - 1 for row in rows if "noloco" in row["label"]]
    best: dict[str, Any] = {}
    for optimizer in RATES:
        for share in SHARES:
            least: dict[str, float] = {}
            for method in CHOSEN:
                named = [label for label in loss if label.startswith(f"{method}_{optimizer}_")]
                fits = [loss[label] for label in named if sent[label] <= share * whole]
                if fits:
                    least[method] = min(fits)
            best[f"{optimizer} {share:g}"] = least
    return {
        "val_loss": loss,
        "bytes_per_peer": sent,
        "seeds": {label: len(same) for label, same in of.items()},
        "final_merge_gap": max(gaps, default=None),
        "frontier": best,
    }


def main() -> None:
    parser = command_line("loss against bytes")
    parser.add_argument("--tune", action="store_true", help="short runs of many settings")
    parser.add_argument("--replicas", type=int, choices=WHOLE, default=8, help="of the frontier")
    parser.add_argument("--at-once", type=int, metavar="N", help="runs at the same time; one a core by default")
    args = parse(parser)
    known = Known("convergence.frontier", args)
    cases = tuning() if args.tune else frontier_cases(replicas=args.replicas)
    rows = run_all(cases, known, args.at_once)
    if args.tune:
        for it, row in zip(cases, rows, strict=True):
            print(f"{row['val_loss_mean']:.4f} (averaged {row['val_loss_averaged_model']:.4f})  {it.key}")
        return
    result = figures(rows)
    finish("convergence.frontier", result, str(result["frontier"]), args)


if __name__ == "__main__":
    main()
