"""From a boundary to the partner: how long it takes real nodes to find each other, against their number.

The inner steps are sleeps, so that what is measured is the rendezvous and not two cores that 24 trainers share.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.swarm.support.node_peer import Peer, in_threads, join_all

PACE = 10.0  # inner phases of 10 s: in 3 s 24 nodes on two cores do not get through their proposals


def measure(sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Median seconds of those that found a partner, and the share that did, by the number of peers."""
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
                with suppress(TimeoutError):  # 24 of them share two cores: then it learns of the others by and by
                    peer.presence._members.refresh_all()
            join_all(in_threads(*(partial(peer.train, rounds) for peer in peers)), 120)
            waits = [wait for peer in peers for wait, group in zip(peer.waits, peer.groups, strict=True) if group.links]
            seconds[str(size)] = median(waits)
            found[str(size)] = len(waits) / sum(len(peer.waits) for peer in peers)
    return {"match_seconds": seconds, "found_share": found}
