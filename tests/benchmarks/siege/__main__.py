"""A bootstrap node and six peers, open or invited; every attack in turn, by a process of its own.

python -m tests.benchmarks.siege [--quick] [--json FILE] [--seconds S] [--only ATTACK ...] [--check]

One swarm of each kind goes through its attacks; after an attack that ended a process there is a new one. Before and
during (for ``--seconds`` each): ``merged``, the share of merged rounds of the honest peers; ``merges_a_minute`` of
one; ``idle``, their share of time in match and exchange. ``rss_growth_mib``: the largest growth of the resident memory
of a node with its daemon. ``loss_ratio``: mean training loss during the attack over that before. ``joined_seconds``:
until a newcomer had the weights of a member. ``monitor``: did the bootstrap's page answer? ``forged_lines``: nodes with
an escape character in their output. ``tried``, ``taken``: requests of the attacker, and those that were answered with
something. ``met``: ended rounds with a hostile member as partner. It takes the place of one of the six, which has left
before: of five one peer is alone in each round of pairs.

A FILE keeps runs of one setting, each with its commit. What it has is not run again but with ``--only``; without that,
all must be of this commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.common import command_line, made_by
from tests.benchmarks.siege.attacks import ATTACKS, BOTH, QUICK, Swarm
from tests.benchmarks.siege.besieged import PEERS, Besieged

GOALS = (  # of each attack, with its name, and whether a row meets it
    ("nobody ends", lambda row: row["died"] == 0),
    ("merged share at least 0.9 of before", lambda row: row["merged_during"] >= 0.9 * row["merged_before"]),
    ("at most 64 MiB growth", lambda row: row["rss_growth_mib"] <= 64),
    ("a newcomer joins within 30 s", lambda row: row["joined_seconds"] is not None and row["joined_seconds"] <= 30),
    ("loss within 5%", lambda row: row["loss_ratio"] is not None and row["loss_ratio"] <= 1.05),
    ("the monitor answers", lambda row: row["monitor"]),
    ("no line is forged", lambda row: row["forged_lines"] == 0),
)
Cell = tuple[bool, Swarm, str]  # against a group of everyone?


def main() -> None:
    args = _arguments()
    settings = {"seconds": args.seconds, "peers": PEERS, "quick": args.quick}
    made = made_by("siege", **settings)  # now: a commit that is made meanwhile is not what runs
    found = _known(args.json, made, (*settings, *(() if args.only else ("commit",))))
    cells = [
        (attack.group, swarm, name)
        for name, attack in ATTACKS.items()
        for swarm in (BOTH[:1] if args.quick else BOTH)
        if swarm in attack.swarms and name in (args.only or (QUICK if args.quick else ATTACKS))
    ]
    left = [it for it in cells if args.only or f"{it[2]}, {it[1]}" not in found]
    for group, swarm in product((False, True), BOTH):
        same = [it for it in left if it[:2] == (group, swarm)]
        siege(same, args.seconds, found, args.json, made)
    _finish(found, check=args.check)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, help="before and during an attack (default 60, with --quick 10)")
    args = parser.parse_args()
    args.seconds = args.seconds or (10.0 if args.quick else 60.0)
    return args


def siege(cells: Sequence[Cell], seconds: float, found: dict[str, Any], file: Path | None, made: Any) -> None:
    """These attacks on swarms of one kind. Each row is written as soon as it is there."""
    waiting = list(cells)
    while waiting:
        group, swarm, _ = waiting[0]
        with tempfile.TemporaryDirectory(prefix="siege-") as folder, Besieged(Path(folder), swarm, group=group) as held:
            while waiting:
                name = waiting.pop(0)[2]
                try:
                    row = held.attack(name, seconds)
                except AssertionError as error:
                    print(f"{name}, {swarm}: not measured: {error}", flush=True)
                    break
                found[f"{name}, {swarm}"] = {**row, "made_by": made}
                print(f"{name}, {swarm}: {row}", flush=True)
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps({"attacks": found}, indent=1) + "\n", encoding="utf-8")
                if row["died"]:
                    break


def _known(file: Path | None, made: dict[str, Any], alike: Sequence[str]) -> dict[str, Any]:
    """The rows in ``file``. The program ends when one was made otherwise, by the keys in ``alike``."""
    found: dict[str, Any] = json.loads(file.read_text())["attacks"] if file is not None and file.exists() else {}
    for name, row in found.items():
        for key in alike:
            kept = row["made_by"].get(key)
            if kept != made[key]:
                sys.exit(f"--json {file}: {name} ran with {key} {kept}, not {made[key]}: name another file")
    return found


def _finish(found: dict[str, Any], *, check: bool) -> None:
    missed = [f"{name}: not {goal}" for name, row in found.items() for goal, meets in GOALS if not meets(row)]
    for line in missed:
        print(line)
    worst = min(it["merged_during"] / (it["merged_before"] or 1.0) for it in found.values())
    print(
        f"{len(found)} attacks: {sum(it['died'] for it in found.values())} processes ended, merged share at worst "
        f"{worst:.2f} of before, memory grew by at most {max(it['rss_growth_mib'] for it in found.values()):.0f} MiB, "
        f"{len(missed)} goals of {len(GOALS) * len(found)} missed"
    )
    sys.exit(1 if check and missed else 0)


if __name__ == "__main__":
    main()
