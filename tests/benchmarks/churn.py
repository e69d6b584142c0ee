"""Twelve peers on one machine that are killed, frozen, disconnected and restarted at random for ten minutes.

python -m tests.benchmarks.churn [--quick] [--json FILE]

Each peer has its own host in the network laboratory. swarm/support/shadow.py recomputes every merge.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.benchmarks.common import finish, options
from tests.swarm.support.soak import soak


def main() -> None:
    args = options("the cost of random faults")
    peers, seconds = (4, 60.0) if args.quick else (12, 600.0)
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        found = soak(Path(folder), peers=peers, seconds=seconds, pause=5.0, seed=0)
    words = (
        f"{found['faults']} faults in {seconds:.0f} s among {peers} peers: {found['hangs']} hangs, "
        f"{found['wrong_merges']} of {found['merges']} merges wrong, {found['processes_left']} processes left, longest "
        f"stall {found['longest_stall_s']:.1f} s, at most {found['rounds_lost']} rounds repeated after "
        f"{found['restarts']} restarts, training loss {found['first_loss']:.2f} to {found['last_loss']:.2f}"
    )
    finish("churn", found, words, args.json)


if __name__ == "__main__":
    main()
