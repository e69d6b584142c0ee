"""A bootstrap node and six peers, open or invited; every attack in turn, by a process of its own.

python -m tests.benchmarks.siege [--quick] [--json FILE] [--only ATTACK ...]

``merged_before``, ``merged_during``: share of merged rounds of all honest peers. ``rss_growth_mib``: the largest growth
of the resident memory of a node with its daemon, from the start of an attack to its end. ``loss_ratio``: mean training
loss during the attack over that before. ``joined_seconds``: until a newcomer had the weights of a member.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.benchmarks.common import Known, command_line, finish
from tests.benchmarks.siege.besieged import ATTACKS, QUICK, SWARMS, Besieged


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="ATTACK", help=", ".join(ATTACKS))
    args = parser.parse_args()
    names, seconds = (QUICK, 20.0) if args.quick else (ATTACKS, 60.0)
    known, found = Known(args.json), {}
    for swarm in SWARMS[:1] if args.quick else SWARMS:
        for name in args.only or names:
            found[f"{name}, {swarm}"] = known.get(f"{name}, {swarm}", lambda: run(swarm, name, seconds))  # noqa: B023
    worst = min(it["merged_during"] / it["merged_before"] for it in found.values())
    words = (
        f"{len(found)} attacks: {sum(it['died'] for it in found.values())} processes ended, merged share at worst "
        f"{worst:.2f} of before, memory grew by at most {max(it['rss_growth_mib'] for it in found.values()):.0f} MiB"
    )
    finish("siege", {"attacks": found, "seconds": seconds}, words, args.json)


def run(swarm: str, name: str, seconds: float) -> dict[str, object]:
    """One attack on a new swarm."""
    with tempfile.TemporaryDirectory(prefix="siege-") as folder, Besieged(Path(folder), swarm) as besieged:
        return besieged.attack(name, seconds)


if __name__ == "__main__":
    main()
