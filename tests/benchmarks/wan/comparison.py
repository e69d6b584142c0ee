"""Methods compared by real peers on slow networks: wall time, idle time, bytes, merges and loss.

python -m tests.benchmarks.wan [--quick] [--json FILE] [--runs N] [--only STAGE[/METHOD] ...] [--check]

Each peer has its own host in the network laboratory (tests/netlab) and, in effect, its own accelerator: an inner step
takes a set time, with the cores mostly free (pacer.py). All methods train the same model on the same text for the same
number of inner steps, and all figures are taken by the same code (figures.py). Stages and methods: stages.py.

In a stage with a straggler there is one peer more, which takes twice the time for a step. Figures are of the faster
peers, each against its own computing alone; the run ends with the last of them. Runs in FILE's ``.runs.json`` are not
repeated, so an interrupted benchmark can be continued. ``--check`` measures nothing: it exits with 1 when a goal
(goals.py) is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from statistics import mean, median
from typing import Any

from peer.errors import UserError
from tests.benchmarks.common import Known, command_line, finish, parse
from tests.benchmarks.wan.goals import GOALS, OURS, missed
from tests.benchmarks.wan.plot import plot
from tests.benchmarks.wan.runs import Run, Runs
from tests.benchmarks.wan.stages import METHODS, STRAGGLER, Method, Stage, stages

END = "exchange_end_seconds"
MORE = (
    "end_seconds",
    END,
    "wire_bytes",
    "payload_bytes",
    "val_loss",
    "train_loss",
    "rounds",
    "staleness_steps",
    "middle_ratio",
)
LAST = 5  # points of the curve, 100 inner steps: the validation set is small
FIGURES = (*(it.figure for it in GOALS), *MORE, "overran_share", "work_share")


def compare(runs: Runs, stage: Stage) -> dict[str, list[Run]]:
    """The runs of a stage by method, with the ratios to computing alone: ``wall_ratio``, ``wire_ratio``, ``end_swaps``;
    and ``train_loss``, the mean of the last inner steps.

    A swap takes its bytes over the line's upload rate and a round trip. The end of a run is from the last inner step
    until the last exchange has ended, less that of a peer which computes alone.
    """
    plain = stage.name.removesuffix(STRAGGLER)
    alone = runs.of(stage.name, "alone") or runs.of(plain, "alone")
    found: dict[str, list[Run]] = {}
    for method in METHODS:
        for run in runs.of(stage.name, method):
            more = {"train_loss": mean(loss for _, loss in run["losses"][-LAST:])} if run["losses"] else {}
            if alone:
                more["wall_ratio"] = run["wall_seconds"] / mean(it["wall_seconds"] for it in alone)
            if run.get("payload_bytes"):
                more["wire_ratio"] = run["wire_bytes"] / run["payload_bytes"]
                swap = 8e-6 * run["swap_bytes"] / (stage.plan.access.up_mbit or 1.0) + stage.plan.path.rtt_ms / 1000
                more["swap_seconds"] = swap
                if alone:
                    more["end_swaps"] = (run[END] - mean(it[END] for it in alone)) / swap
            found.setdefault(method, []).append({**run, **more})
    return found


def result(runs: Runs, every: dict[str, Stage]) -> dict[str, Any]:
    """``{figure: {stage: {method: median}}}``, least and most in ``ranges``, and the number of runs of each cell."""
    cells = {name: compare(runs, stage) for name, stage in every.items()}
    table: dict[str, Any] = {figure: {} for figure in FIGURES}
    table["ranges"], table["runs"] = {figure: {} for figure in FIGURES}, {}
    for stage, methods in cells.items():
        for method, found in methods.items():
            table["runs"].setdefault(stage, {})[method] = len(found)
            for figure in FIGURES:
                values = [run[figure] for run in found if figure in run]
                if values and not (method == "alone" and figure == "merged_share"):
                    table[figure].setdefault(stage, {})[method] = median(values)
                    table["ranges"][figure].setdefault(stage, {})[method] = [min(values), max(values)]
    table["stages"] = {name: every[name].settings(METHODS[OURS]) for name, methods in cells.items() if methods}
    return table


def wanted(every: dict[str, Stage], only: list[str]) -> list[tuple[Stage, Method]]:
    """All cells, or those that ``only`` names as STAGE or STAGE/METHOD. A library that is not installed is left out."""
    cells = [(stage, method) for stage in every.values() for method in METHODS.values()]
    if only:
        cells = [(stage, method) for stage, method in cells if {stage.name, f"{stage.name}/{method.name}"} & {*only}]
    cells = [(stage, method) for stage, method in cells if not (stage.drift and method.library)]
    missing = {it.library for _, it in cells if it.library and importlib.util.find_spec(it.library) is None}
    for library in missing:
        print(f"{library} is not installed: its rows are left out", flush=True)
    return [(stage, method) for stage, method in cells if method.library not in missing]


def parsed() -> argparse.Namespace:
    parser = command_line("methods compared by real peers on slow networks")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each cell (3; --quick: 1)")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE[/METHOD]", help="measure only these")
    return parse(parser)


def main() -> None:
    args = parsed()
    every = stages(quick=args.quick)
    try:
        runs = Runs(Known("wan", args), every)
    except UserError as error:
        sys.exit(str(error))
    if args.check:
        args.json = None  # nothing is measured, and nothing written
    else:
        for number in range(1 if args.quick else args.runs):
            for stage, method in wanted(every, args.only):
                runs.make(stage, method, number)
    table = result(runs, every)
    lines = missed(table)
    words = "; ".join(_words(table, stage) for stage in table["wall_ratio"]) or "no runs"
    if args.json:
        plot(table, args.json.with_suffix(".png"))
    finish("wan", {**table, "missed": lines}, words, args, dict.fromkeys(lines, False))


def _words(table: dict[str, Any], stage: str) -> str:
    """A stage's wall ratios and idle shares."""
    walls, idle = table["wall_ratio"][stage], table["idle_share"][stage]
    return f"{stage}: " + ", ".join(f"{it} {walls[it]:.3f} ({idle[it]:.1%} idle)" for it in walls)
