"""Swarms in virtual time, each with the faults of its seed: is a promise broken anywhere?

python -m tests.benchmarks.schedules [--seeds N] [--first SEED] [--quick] [--json FILE]

Every seed is a swarm of 4 to 64 peers for minutes of virtual time (tests/simulated). Replay one with
``python -m tests.simulated --seed N``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from tests.benchmarks.common import Known, command_line, finish, parse

SEEDS, QUICK = 10_000, 40
BLOCK = 50  # seeds of one process: a killed process' memory comes back with it


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parse(parser)
    count = QUICK if args.quick else args.seeds
    starts = range(args.first, args.first + count, BLOCK)
    blocks = [range(start, min(start + BLOCK, args.first + count)) for start in starts]
    found = total(measured(blocks, Known("schedules", args)))
    words = (
        f"{found['seeds']} seeds, {found['virtual_hours']:.0f} virtual hours of {found['peers']} peers, "
        f"{found['events']:,} events, {sum(found['faults'].values())} faults, {found['merges']:,} merges: "
        f"{found['violations']} violations"
    )
    goals = {
        "no promise is broken": found["violations"] == 0,
        "a million merges": args.quick or found["merges"] >= 1_000_000,
    }
    finish("schedules", found, words, args, goals)


def measured(blocks: list[range], known: Known) -> list[dict[str, Any]]:
    """The figures of each block; those that are known already are not made again."""
    missing = [block for block in blocks if _name(block) not in known.found]
    os.environ["PYTHONHASHSEED"] = "0"  # of the processes that start from now on: one seed is one trace
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for block, figures in zip(missing, pool.imap(run_block, missing), strict=True):
            known.get(_name(block), partial(dict, figures))
    return [known.get(_name(block), dict) for block in blocks]


def run_block(seeds: range) -> dict[str, Any]:
    """All seeds of a block, one after the other."""
    from tests.simulated.scenario import scenario
    from tests.simulated.world import simulate

    reports = [simulate(scenario(seed)) for seed in seeds]
    return {
        "seeds": len(reports),
        "peers": sum(len(it.scenario.machines) for it in reports),
        "virtual_hours": sum(it.virtual_seconds for it in reports) / 3600,
        "events": sum(it.steps for it in reports),
        "kinds": Counter(it.scenario.kind for it in reports),
        "faults": sum((it.faults for it in reports), Counter[str]()),
        "liars": Counter(machine.lie for it in reports for machine in it.scenario.machines if machine.lie),
        "merges": sum(it.merges for it in reports),
        "outcomes": sum((Counter(map_names(it.outcomes)) for it in reports), Counter[str]()),
        "violations": sum(bool(it.violations) for it in reports),
        "violated": {str(it.scenario.seed): it.violations[0] for it in reports if it.violations},
    }


def map_names(outcomes: Counter[Any]) -> dict[str, int]:
    """By the outcomes' names."""
    return {str(outcome): count for outcome, count in outcomes.items()}


def total(blocks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums of all figures, by name where they have names."""
    found: dict[str, Any] = {}
    for block in blocks:
        for name, value in block.items():
            if isinstance(value, dict) and name != "violated":
                found[name] = dict(Counter(found.get(name, {})) + Counter(value))
            elif isinstance(value, dict):
                found[name] = {**found.get(name, {}), **value}
            else:
                found[name] = found.get(name, 0) + value
    return found


def _name(seeds: range) -> str:
    return f"{seeds[0]}-{seeds[-1]}"


if __name__ == "__main__":
    main()
