"""Replays one seed with its trace: ``python -m tests.simulated --seed N``."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulated.scenario import scenario
from tests.simulated.world import simulate


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of texts is a part of what happens
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="so many seeds from this one on, without a trace")
    parser.add_argument("--kind", choices=("blocking", "overlapped", "group", "decoupled"))
    parser.add_argument("--peers", type=int)
    parser.add_argument("--long", action="store_true", help="half as long again, as when the kept seeds found a defect")
    parser.add_argument("--ends", action="store_true", help="the run ends while faults happen")
    parser.add_argument("--log", action="store_true", help="with the log lines of the peers")
    args = parser.parse_args()
    bad = 0
    for seed in range(args.seed, args.seed + args.count):
        began = time.monotonic()
        say = print if args.count == 1 else None
        report = simulate(scenario(seed, args.peers, args.kind, long=args.long, ends=args.ends), say, log=args.log)
        bad += bool(report.violations)
        it = report.scenario
        outcomes = " ".join(f"{name}={count}" for name, count in sorted(report.outcomes.items()))
        print(
            f"seed {seed}: {it.kind} {it.codec} {len(it.machines)} peers {report.virtual_seconds:.0f} s "
            f"{report.merges} merges ({outcomes}) {sum(report.faults.values())} faults {report.steps} events "
            f"{len(report.violations)} violations in {time.monotonic() - began:.1f} s",
            flush=True,
        )
        for violation in report.violations[:5]:
            print(f"    {violation}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
