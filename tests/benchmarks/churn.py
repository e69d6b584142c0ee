"""Peers on one machine that are killed, frozen, disconnected and restarted at random for two hours.

python -m tests.benchmarks.churn [--quick] [--json FILE] [--seconds S] [--peers N]

They train the demo's model by default settings, each on its own host in the network laboratory.
swarm/support/shadow.py computes a sixteenth of all parts of their swaps again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.benchmarks.common import command_line, finish, parse
from tests.swarm.support.soak import soak


def main() -> None:
    parser = command_line("the cost of random faults")
    parser.add_argument("--seconds", type=float, help="default: 7200, with --quick 60")
    parser.add_argument("--peers", type=int, help="default: 8, with --quick 4")
    args = parse(parser)
    peers, seconds = args.peers or (4 if args.quick else 8), args.seconds or (60.0 if args.quick else 7200.0)
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        found = soak(Path(folder), peers=peers, seconds=seconds, pause=5.0, seed=0)
    words = (
        f"{found['faults']} faults in {seconds:.0f} s among {peers} peers: {found['hangs']} hangs, "
        f"{found['merged_share']:.0%} of {found['rounds']} rounds merged, {len(found['wrong_parts'])} of "
        f"{found['parts']} parts wrong, {found['processes_left']} processes left, memory × "
        f"{found['memory_growth']:.3f}, longest time without a round {found['longest_stall_s']:.1f} s (with frozen and "
        f"cut time {found['longest_stall_with_faults_s']:.1f} s), at most {found['rounds_lost']} rounds repeated after "
        f"{found['restarts']} restarts, training loss {found['first_loss']:.2f} to {found['last_loss']:.2f}"
    )
    goals = {
        "nothing hangs": found["hangs"] == 0,
        "every part is right": not found["wrong_parts"] and found["parts"] > 0,
        "no process is left": found["processes_left"] == 0,
        "no peer repeats more rounds than it must": not found["lost_too_many"],
        "memory grows by at most 2%": found["memory_growth"] <= 1.02,
    }
    finish("churn", found, words, args, goals, seconds=seconds, peers=peers)


if __name__ == "__main__":
    main()
