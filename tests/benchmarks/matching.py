"""The time from a boundary to the partner on real nodes, by the number of peers.

python -m tests.benchmarks.matching [--quick] [--json FILE]

The inner steps are sleeps, so that 24 trainers on two cores do not distort the measurement.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.common import finish, options
from tests.swarm.support.node_peer import Peer, in_threads, join_all

PACE = 10.0  # inner phases of 10 s: 3 s are too few for the proposals of 24 nodes on two cores


def measure(sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Median seconds to a partner, and the share of boundaries with one, by the number of peers."""
    seconds: dict[str, float] = {}
    found: dict[str, float] = {}
    for size in sizes:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            peers: list[Peer] = []
            for index in range(size):
                peers.append(Peer(f"p{index}", folder, peers[0].node.addresses if peers else ()))
                peers[-1].pace = PACE
                stack.callback(peers[-1].presence.leave)
            for peer in peers:
                with suppress(TimeoutError):  # 24 nodes share two cores: then it finds the others later
                    peer.presence._members.refresh_all()
            join_all(in_threads(*(partial(peer.train, rounds) for peer in peers)), 120)
            waits = [wait for peer in peers for wait, group in zip(peer.waits, peer.groups, strict=True) if group.links]
            seconds[str(size)] = median(waits)
            found[str(size)] = len(waits) / sum(len(peer.waits) for peer in peers)
    return {"match_seconds": seconds, "found_share": found}


def main() -> None:
    args = options("the time from a boundary to the partner")
    found = measure((4, 8), 2) if args.quick else measure((4, 8, 24), 5)
    words = ", ".join(f"{1000 * seconds:.0f} ms among {size}" for size, seconds in found["match_seconds"].items())
    finish("matching", found, f"from a boundary to the partner: {words}", args)


if __name__ == "__main__":
    main()
